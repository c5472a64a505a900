"""Equal tokenizers have one digest wherever their files were written; any other has another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from facility.exchange.checkpoints.tokenizer import tokenizer_digest, tokenizers_differ
from facility.exchange.errors import InputError
from tests.preparing.corpora import save_bert_tokenizer, save_tokenizer


def rewritten(source: Path, target: Path, kind: str) -> Path:
    """Loaded as the named class, whose own normalizer and pre_tokenizer transformers 5 puts in, and saved again."""
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": kind}))
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return target


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "LlamaTokenizerFast"])
def test_a_tokenizer_saved_again_is_the_same(tmp_path: Path, kind: str):
    source = save_tokenizer(tmp_path / "a", unk_token="<unk>", bos_token="<s>")
    AutoTokenizer.from_pretrained(source).save_pretrained(source)
    target = rewritten(source, tmp_path / "b", kind)
    if kind == "Qwen2Tokenizer":
        assert (source / "tokenizer.json").read_bytes() != (target / "tokenizer.json").read_bytes()
    assert AutoTokenizer.from_pretrained(target).get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()
    assert tokenizer_digest(source) == tokenizer_digest(target)


def test_a_word_piece_tokenizer_saved_again_is_the_same(tmp_path: Path):
    source = save_bert_tokenizer(tmp_path / "a")
    assert tokenizer_digest(source) == tokenizer_digest(rewritten(source, tmp_path / "b", "BertTokenizer"))


def changed(raw: dict[str, Any], change: str) -> None:
    model = raw["model"]
    if change == "two ids swapped":
        a, b = sorted(model["vocab"])[40:42]
        model["vocab"][a], model["vocab"][b] = model["vocab"][b], model["vocab"][a]
    elif change == "merges in another order":
        model["merges"].reverse()
    else:
        raw["added_tokens"][0]["content"] = "<|fin|>"


@pytest.mark.parametrize("change", ["two ids swapped", "merges in another order", "another added token"])
def test_another_tokenizer_of_the_same_size_differs(tmp_path: Path, change: str):
    model, other = save_tokenizer(tmp_path / "model"), save_tokenizer(tmp_path / "other")
    raw = json.loads((other / "tokenizer.json").read_text())
    changed(raw, change)
    (other / "tokenizer.json").write_text(json.dumps(raw))
    told, expected = tokenizer_digest(other), tokenizer_digest(model)
    assert tokenizers_differ(told, expected) and told is not None and expected is not None


def test_the_way_merges_are_written_does_not_matter(tmp_path: Path):
    one, two = save_tokenizer(tmp_path / "one"), save_tokenizer(tmp_path / "two")
    raw = json.loads((two / "tokenizer.json").read_text())
    raw["model"]["merges"] = [" ".join(pair) for pair in raw["model"]["merges"]]
    (two / "tokenizer.json").write_text(json.dumps(raw, indent=2))
    assert tokenizer_digest(one) == tokenizer_digest(two)


def test_what_cannot_be_compared_is_not_refused(tmp_path: Path):
    known = tokenizer_digest(save_tokenizer(tmp_path / "fast"))
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "vocab.txt").write_text("[PAD]\nuno\n")
    slow = tokenizer_digest(tmp_path / "slow")
    assert slow is not None and slow.startswith("vocab.txt:")
    assert not any(tokenizers_differ(known, other) for other in (None, "", "0" * 64, slow, known))
    assert tokenizer_digest(tmp_path / "nowhere") is None
    (tmp_path / "fast" / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(InputError, match="not a tokenizer"):
        tokenizer_digest(tmp_path / "fast")
