"""`crossfed check` tells of a base model that is not there, is another one than stated, or not everybody's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from coordinator.config.federation import read_federation
from coordinator.preflight.base_model import CHECK
from coordinator.preflight.check import check
from coordinator.preflight.row import Row
from facility.exchange.checkpoints.base_model import base_digest
from facility.exchange.errors import ConfigurationError
from tests.federations import write_federation
from tests.forked_trainers import variables
from tests.pico import save_pico


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two facilities with a base model each, the same one."""
    for name, value in (variables() | {"XDG_CACHE_HOME": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    for name in ("alpha", "beta"):
        save_pico(tmp_path / "bases" / name, dtype="bfloat16")
    return tmp_path


def rows_of(root: Path, **lora: Any) -> dict[str, list[Row]]:
    """What `check` says of the bases, by facility."""
    training = {"lora": {"rank": 2, "targets": ["q_proj"]} | lora}
    shutil.rmtree(root / "federation", ignore_errors=True)
    path = write_federation(root / "federation", ["alpha", "beta"], training=training)
    text = path.read_text()
    for name in ("alpha", "beta"):
        own = {"lora": training["lora"] | {"base": str(root / "bases" / name)}}
        text = text.replace(f"name: {name}", f"name: {name}\n  training: {json.dumps(own)}")
    path.write_text(text)
    rows = [row for row in check(path) if row.check == CHECK]
    return {name: [row for row in rows if row.subject == name] for name in ("alpha", "beta")}


def test_the_stated_one_passes_and_another_fails_by_name(federation: Path):
    digest = base_digest(federation / "bases" / "alpha")
    assert base_digest(federation / "bases" / "beta") == digest
    both = rows_of(federation, base_sha256=digest)
    assert [row.verdict for rows in both.values() for row in rows] == ["ok", "ok"]
    save_pico(federation / "bases" / "beta", dtype="bfloat16", vocab_size=256)
    found = rows_of(federation, base_sha256=digest)
    (wrong,) = found["beta"]
    assert found["alpha"][0].verdict == "ok" and wrong.verdict == "fail"
    assert digest in wrong.found and base_digest(federation / "bases" / "beta") in wrong.found


@pytest.mark.slow
def test_where_none_is_stated_they_are_compared_with_each_other(federation: Path):
    digest = base_digest(federation / "bases" / "alpha")
    for (row,) in rows_of(federation).values():
        assert row.verdict == "warning" and f"base_sha256: {digest}" in row.fix
    save_pico(federation / "bases" / "beta", dtype="bfloat16", vocab_size=256)
    failing = [row for rows in rows_of(federation).values() for row in rows if row.verdict == "fail"]
    assert failing and "adapters of different models would be averaged" in failing[0].found


def test_a_base_that_is_no_model_is_told(federation: Path):
    (federation / "bases" / "beta" / "model.safetensors").unlink()
    (row,) = rows_of(federation)["beta"]
    assert row.verdict == "fail" and "is not a model at the facility" in row.found


@pytest.mark.parametrize(
    ("lora", "word"),
    [
        ({"base_sha256": "0" * 64}, "is stated without lora.base"),
        ({"base": "x", "base_sha256": "ABC"}, "expected 64 hexadecimal digits"),
    ],
)
def test_a_digest_without_a_base_or_that_is_none_is_refused(tmp_path: Path, lora: dict[str, str], word: str):
    path = write_federation(tmp_path, ["alpha"], training={"lora": {"rank": 2} | lora})
    with pytest.raises(ConfigurationError, match=word):
        read_federation(path)


def test_facilities_with_different_bases_stated_are_refused(tmp_path: Path):
    path = write_federation(tmp_path, ["alpha", "beta"])
    text = path.read_text()
    for name, digit in (("alpha", "0"), ("beta", "1")):
        own = {"lora": {"rank": 2, "base": "x", "base_sha256": digit * 64}}
        text = text.replace(f"name: {name}", f"name: {name}\n  training: {json.dumps(own)}")
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="expected one base for all facilities"):
        read_federation(path)
