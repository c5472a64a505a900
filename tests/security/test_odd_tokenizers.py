"""A published tokenizer whose files make the library that reads them panic: one sentence of an error, no traceback."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from coordinator.model import convert_model
from facility import prepare
from facility.dataset import DatasetError
from facility.exchange.checkpoints import tokenizer as read_tokenizer
from facility.exchange.checkpoints.tokenizer import tokenizer_digest
from facility.exchange.errors import InputError, exit_on_error
from facility.exchange.panics import panics_refused
from facility.preparing import encoding
from facility.preparing.tokenizer import load_tokenizer
from tests.pico import save_pico
from tests.preparing.corpora import save_tokenizer, sentences, write_json_lines

AS_IT_IS_LOADED: dict[str, Any] = {
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Precompiled", "precompiled_charsmap": 0}]}
}
MISSING = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}
AS_IT_ENCODES: dict[str, Any] = {
    "post_processor": {"type": "TemplateProcessing", "single": [MISSING], "pair": [MISSING], "special_tokens": {}}
}


def tokenizer(place: Path, change: dict[str, Any]) -> Path:
    """A tokenizer whose tokenizer.json is altered so."""
    file = save_tokenizer(place, bos_token="<|end|>") / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    return place


@pytest.mark.parametrize("change", [AS_IT_IS_LOADED, AS_IT_ENCODES], ids=["as it is loaded", "as it encodes"])
def test_prepare_refuses_a_tokenizer_that_panics(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    texts = write_json_lines(tmp_path / "text.jsonl", [{"text": text} for text in sentences(20)])
    words = ["--input", texts, "--tokenizer", tokenizer(tmp_path / "tokenizer", change), "--out", tmp_path / "out"]
    assert exit_on_error(lambda: prepare.main([*map(str, words), "--block-tokens", "16"])) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: the tokenizer in {tmp_path / 'tokenizer'} cannot be used: ") or "be loaded" in said
    assert said.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_model_that_comes_with_one_is_refused(tmp_path: Path):
    model = save_pico(tmp_path / "model", dtype="float32")
    tokenizer(tmp_path / "tokenizer", AS_IT_IS_LOADED)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "tokenizer" / name).rename(model / name)
    with pytest.raises(InputError, match=f"the tokenizer of {model} cannot be used: "):
        convert_model(str(model), tmp_path / "out", dtype="float32", revision="main")
    assert not (tmp_path / "out").exists()


def test_so_is_one_that_a_job_compares_with_its_datasets(tmp_path: Path):
    """It comes with the coordinator's model, and what is no `Exception` would end a rank without its reason."""
    with pytest.raises(DatasetError, match=r"cannot be loaded: tokenizer\.json cannot be used: "):
        load_tokenizer(tokenizer(tmp_path / "tokenizer", AS_IT_IS_LOADED))


def test_a_tokenizer_without_end_is_not_read(tmp_path: Path):
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match=r"tokenizer\.json is not a tokenizer: .*at most"):
        tokenizer_digest(tmp_path)


def test_one_that_takes_all_memory_or_time_as_it_is_loaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its normalizer doubles an added token of its own forty times."""
    doubles = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    plain = json.loads((tokenizer(tmp_path / "plain", {}) / "tokenizer.json").read_text())["added_tokens"]
    token = plain[0] | {"id": 4000, "content": "a", "normalized": True, "special": False}
    endless = {"type": "Sequence", "normalizers": [doubles] * 40}
    hostile = tokenizer(tmp_path / "tokenizer", {"normalizer": endless, "added_tokens": [*plain, token]})
    model = save_pico(tmp_path / "model", dtype="float32")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((hostile / name).read_bytes())
    monkeypatch.setattr(read_tokenizer, "LOAD_SECONDS", 1)
    with pytest.raises(InputError, match="cannot be loaded in 1 s and 4 GiB"):
        load_tokenizer(hostile)
    with pytest.raises(InputError, match="cannot be loaded in 1 s and 4 GiB"):
        convert_model(str(model), tmp_path / "out", dtype="float32", revision="main")
    monkeypatch.setattr(read_tokenizer, "LOAD_SECONDS", 60)
    monkeypatch.setattr(read_tokenizer, "LOAD_BYTES", 1 << 27)
    with pytest.raises(InputError, match="cannot be loaded"):
        load_tokenizer(hostile)
    monkeypatch.setattr(read_tokenizer, "LOAD_BYTES", 4 << 30)
    assert load_tokenizer(tmp_path / "plain").vocab_size > 0


def test_a_process_that_encodes_hands_its_panic_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    odd = Tokenizer.from_file(str(tokenizer(tmp_path / "tokenizer", AS_IT_ENCODES) / "tokenizer.json"))
    monkeypatch.setattr(encoding, "_encode", lambda documents: odd.encode_batch(["uno"]))
    with pytest.raises(InputError, match="the tokenizer cannot be used: ") as caught:
        encoding._work([])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # as the pool hands it over


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), KeyError("x")], ids=repr)
def test_nothing_else_is_taken_for_a_panic(error: BaseException):
    with pytest.raises(type(error)) as caught, panics_refused("it"):
        raise error
    assert caught.value is error and "PanicException" not in sys.modules
