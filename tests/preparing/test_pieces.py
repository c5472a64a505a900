"""Long texts are encoded in pieces: the ids are those of the whole text, and memory does not grow with it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from facility.exchange.errors import InputError
from facility.preparing import pieces
from facility.preparing.chat import ChatEncoder, chat_encoding
from facility.preparing.conversations import conversation_of
from facility.preparing.encoding import encoder, encoding_of
from facility.preparing.sources import Document
from facility.preparing.template import parse_template
from facility.preparing.tokenizer import load_tokenizer
from tests.preparing.corpora import WORDS, save_tokenizer, sentences, write_json_lines

WORDS_OF_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "byte level": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "byte level with a space before": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "llama 3": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS_OF_LLAMA_3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "phrases": pre_tokenizers.Split(Regex(r"[^.]+\.?"), "isolated"),
    "metaspace": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "metaspace, whole": pre_tokenizers.Metaspace(split=False),
    "bert": pre_tokenizers.BertPreTokenizer(),
    "none": None,
}


def hostile_text(words: int) -> str:
    """Words, runs of white space, ends of lines, numbers, marks that combine, half of them without a space between."""
    draw = random.Random(5)
    between = [" ", " ", " ", "  ", "\n", " \n\n ", "\t", ". ", ".\n", "'s ", "", "\u00a0", "\u0301 "]
    known = [*WORDS, "123456", "l'uomo", "città", "漢字", "😀", "<|end|>"]
    return "".join(draw.choice(known) + draw.choice(between) for _ in range(words))


def unspaced_text(words: int) -> str:
    """As Chinese or Japanese is written."""
    draw = random.Random(6)
    return "".join(
        draw.choice(["漢字", "仮名", "かな", "2026", "GPU"]) + draw.choice("。、、「」…\u0301") for _ in range(words)
    )


SPACED = {True: hostile_text, False: unspaced_text}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@pytest.mark.parametrize("wrapped, spaced", [(False, True), (True, True), (False, False)])
def test_the_pieces_have_the_ids_of_the_whole(name: str, wrapped: bool, spaced: bool, monkeypatch: pytest.MonkeyPatch):
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.NFC()
    if PRE_TOKENIZERS[name] is not None:
        tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]
    text = SPACED[spaced](3_000)
    special = ["[UNK]", "[CLS]", "[SEP]", "<|end|>"]
    tokenizer.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    whole = tokenizer.encode(text, add_special_tokens=wrapped).ids
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 700)
    monkeypatch.setattr(pieces, "BATCH_CHARACTERS", 1_500)
    monkeypatch.setattr(pieces, "WINDOW_CHARACTERS", 100)
    parts = pieces.split_text(text, tokenizer)
    assert "".join(parts) == text
    if name == "none":
        assert parts == [text]
    elif spaced or name in ("byte level", "llama 3", "bert"):  # others end a word at white space or a full stop only
        assert len(parts) > 10 or name == "metaspace, whole"  # at an added token only
    found = pieces.encode_texts(["un gatto", text, "dorme"], tokenizer, wrapped=wrapped)
    assert found[1].tolist() == whole
    assert [found[0].tolist(), found[2].tolist()] == [
        tokenizer.encode(t, add_special_tokens=wrapped).ids for t in ("un gatto", "dorme")
    ]


def test_text_without_white_space_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 100)
    tokenizer = Tokenizer.from_file(str(save_tokenizer(tmp_path / "tokenizer") / "tokenizer.json"))
    assert pieces.split_text("gatto" * 100, tokenizer) == ["gatto" * 100]


CHATML = (
    "{% for m in messages %}<|begin|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize("spelled", [False, True])
def test_a_long_conversation_in_pieces_has_the_ids_and_the_loss_of_the_whole(
    spelled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`spelled`: messages spell a special token here and there."""
    directory = save_tokenizer(tmp_path / "tokenizer", chat_template=CHATML)
    tokenizer = load_tokenizer(directory)
    encode = ChatEncoder(tokenizer.backend_tokenizer.to_str(), chat_encoding(tokenizer, directory, None, "all-turns"))
    long = [hostile_text(900) if spelled else " ".join(sentences(300)), " ".join(sentences(400, 500))]
    turns = ["user", long[0]], ["assistant", "breve"], ["user", "corta"], ["assistant", long[1]], ["user", "una"]
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    text = conversation_of(record, "here").to_json()
    (whole,) = encode(text)
    parts: list[int] = []
    split = pieces.split_text
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 700)
    monkeypatch.setattr(pieces, "WINDOW_CHARACTERS", 100)
    monkeypatch.setattr(pieces, "split_text", lambda *a: (found := split(*a), parts.append(len(found)))[0])
    (found,) = encode(text)
    assert max(parts) > 10
    assert found.ids.tolist() == whole.ids.tolist() and found.loss.tolist() == whole.loss.tolist()
    assert 0 < whole.loss.sum() < len(whole.ids)


SPECIAL = ["[UNK]", "<s>", "</s>", "<sep>", "<cls>"]
PAIRS = {
    "bert": processors.BertProcessing(("</s>", 2), ("<s>", 1)),
    "roberta": processors.RobertaProcessing(("</s>", 2), ("<s>", 1)),
    "t5": ("$A </s>", "$A </s> $B:1 </s>:1"),
    "llama": ("<s> $A", "<s> $A <s> $B:1"),
    "xlnet": ("$A <sep> <cls>", "$A <sep> $B:1 <sep>:1 <cls>:2"),
    "gpt2": None,
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_cut_as_transformers_cuts_them(name: str, side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where there is room for one token, and for an odd number of them; texts are encoded in pieces."""
    bare = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*SPECIAL, *sorted(set(WORDS))])}, "[UNK]"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if (around := PAIRS[name]) is not None:
        if isinstance(around, tuple):
            around = processors.TemplateProcessing(*around, [(t, i) for i, t in enumerate(SPECIAL)])
        bare.post_processor = around
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, truncation_side=side, unk_token="[UNK]")
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 30)
    monkeypatch.setattr(pieces, "WINDOW_CHARACTERS", 20)
    text = " ".join(WORDS)
    lengths = [0, 1, 2, 5, 10, len(WORDS)]
    texts = [(" ".join(WORDS[:one]), " ".join(WORDS[-other:]) if other else "") for one in lengths for other in lengths]
    assert len(pieces.split_text(text, bare)) > 2
    uncut = [len(tokenizer(one, other or None).input_ids) for one, other in texts]
    least = 1 + tokenizer.num_special_tokens_to_add(pair=True)
    for most in (least, least + 1, 12, 15, 22):
        how = encoding_of(
            tokenizer, tmp_path, parse_template("{text}"), specials={}, wrap=True, max_tokens=most, chat=None
        )
        found = encoder(how)([Document(text=one, pair=other, done=0.0) for one, other in texts])
        rows = [tokenizer(one, other or None, truncation=True, max_length=most) for one, other in texts]
        seconds = [row.sequence_ids().index(1) if 1 in row.sequence_ids() else len(row.input_ids) for row in rows]
        assert found.tokens.tolist() == [token for row in rows for token in row.input_ids]
        assert found.lengths.tolist() == [len(row.input_ids) for row in rows] and found.seconds.tolist() == seconds
        assert found.truncated == sum(length > most for length in uncut)


@pytest.mark.parametrize("template", ["$B:1 <sep> $A", "$A <sep> $A $B:1"])
def test_a_tokenizer_that_does_not_join_texts_as_they_are_is_refused(template: str):
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*SPECIAL, *sorted(set(WORDS))])}, "[UNK]"))
    tokenizer.post_processor = processors.TemplateProcessing("$A $A", template, [("<sep>", 3)])
    with pytest.raises(InputError, match=r"does not keep the ids of texts as they are.*twice, as a pair"):
        pieces.special_tokens(tokenizer, pair=True)


def peaks_of(runs: list[list[Any]]) -> list[float]:
    """Megabytes at the peak of one process after each of these preparations, which succeed."""
    program = (
        "import json, re, sys; from facility.prepare import main\n"
        # ru_maxrss begins with the peak of the process that started this one.
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1]) / 1024\n"
        "codes_and_peaks = [(main(run), peak()) for run in json.loads(sys.argv[1])]\n"
        "print(json.dumps(codes_and_peaks))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(runs, default=str)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not any(code for code, _ in found)
    return [peak for _, peak in found]


@pytest.mark.slow
def test_a_line_of_ten_megabytes_needs_little_memory(tmp_path: Path):
    text = " ".join(sentences(7_000))
    text = " ".join([text] * (10_000_000 // len(text) + 1))
    train = write_json_lines(tmp_path / "train.jsonl", [{"text": text}])
    small = write_json_lines(tmp_path / "small.jsonl", [{"text": s} for s in sentences(50, 500)])
    validation = write_json_lines(tmp_path / "validation.jsonl", [{"text": s} for s in sentences(50)])
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    more = ["--validation", validation, "--tokenizer", tokenizer, "--block-tokens", "64"]
    runs = [["--input", path, "--out", tmp_path / name, *more] for path, name in ((small, "first"), (train, "out"))]
    before, after = peaks_of(runs)
    assert after - before < 300, "megabytes beside what was imported, and a small text takes"
    reference = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    blocks = numpy.load(tmp_path / "out" / "train.npy", mmap_mode="r")
    assert blocks[:100].ravel().tolist() == reference.encode(text[:50_000]).ids[:6_400]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "chat"])
def test_a_long_text_to_classify_and_a_long_message_need_little_memory(task: str, tmp_path: Path):
    text = " ".join(sentences(7_000))
    text = " ".join([text] * (4_000_000 // len(text) + 1))

    def record(number: int, one: str) -> dict[str, Any]:
        if task == "chat":
            return {"messages": [{"role": "user", "content": "sogna"}, {"role": "assistant", "content": one}]}
        return {"text": one, "label": "ab"[number % 2]}

    written = {"small": sentences(50, 500), "train": [*sentences(50, 900), text], "validation": sentences(50)}
    files = {
        name: write_json_lines(tmp_path / f"{name}.jsonl", [record(n, one) for n, one in enumerate(texts)])
        for name, texts in written.items()
    }
    tokenizer = save_tokenizer(tmp_path / "tokenizer", chat_template=CHATML)
    more = ["--task", task, "--validation", files["validation"], "--tokenizer", tokenizer, "--block-tokens", "64"]
    runs = [["--input", files[name], "--out", tmp_path / name, *more] for name in ("small", "train")]
    before, after = peaks_of(runs)
    assert after - before < 300, "megabytes beside what was imported, and small texts take"


@pytest.mark.slow
def test_a_pair_of_two_long_texts_needs_little_memory(tmp_path: Path):
    """The library would make every pair of the parts that are cut away: of these two texts 1.5 GB."""
    text = " ".join(sentences(400))[:15_000]

    def pairs(name: str, longest: str) -> Path:
        texts = [*sentences(49), longest]
        records = [{"text": one, "pair": one, "label": "ab"[n % 2]} for n, one in enumerate(texts)]
        return write_json_lines(tmp_path / f"{name}.jsonl", records)

    files = {"small": pairs("small", "sogna"), "train": pairs("train", text)}
    validation = pairs("validation", "nuota")
    more = ["--task", "classification", "--pair-field", "pair", "--allow-overlap", "--block-tokens", "64"]
    more += ["--validation", validation, "--tokenizer", save_tokenizer(tmp_path / "tokenizer")]
    before, after = peaks_of([["--input", path, "--out", tmp_path / name, *more] for name, path in files.items()])
    assert after - before < 150, "megabytes beside what was imported, and small texts take"
