"""Long texts are encoded in pieces: the ids are those of the whole text, and memory does not grow with it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from facility.preparing import pieces
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
    found = pieces.encode_texts(["un gatto", text, "dorme"], tokenizer, special_tokens=wrapped)
    assert found[1].tolist() == whole
    assert [found[0].tolist(), found[2].tolist()] == [
        tokenizer.encode(t, add_special_tokens=wrapped).ids for t in ("un gatto", "dorme")
    ]


def test_text_without_white_space_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 100)
    tokenizer = Tokenizer.from_file(str(save_tokenizer(tmp_path / "tokenizer") / "tokenizer.json"))
    assert pieces.split_text("gatto" * 100, tokenizer) == ["gatto" * 100]


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
    (first, before), (second, after) = json.loads(done.stdout.splitlines()[-1])
    assert first == second == 0 and after - before < 300, "megabytes beside what was imported, and a small text takes"
    reference = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    blocks = numpy.load(tmp_path / "out" / "train.npy", mmap_mode="r")
    assert blocks[:100].ravel().tolist() == reference.encode(text[:50_000]).ids[:6_400]
