"""The digest of a base model: the manifest's, hashed once for all federations, again as soon as a file is another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coordinator.preflight.probe_answer import PROBE_SECONDS
from coordinator.publishing import digest as digest_of_published
from facility import base_model as digest_of_base
from facility import probe
from facility.exchange.checkpoints import base_model
from facility.exchange.checkpoints.base_model import NAME, base_digest, check_base, remembered_digest, tensor_files
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.errors import CheckpointError, InputError
from facility.exchange.files.user_cache import user_cache
from facility.exchange.messages.manifest import read_manifest
from tests.aggregation import make

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model in several files with a manifest."""
    tensors = {name: torch.randn(500, 10, generator=torch.Generator().manual_seed(2)) for name in "abc"}
    return make.model(tmp_path / "model", tensors, shard_bytes=25_000)


def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are hashed from here on."""
    found: list[Path] = []
    original = base_model.sha256_until
    monkeypatch.setattr(base_model, "sha256_until", lambda path, until: (found.append(path), original(path, until))[1])
    return found


def test_it_is_the_manifests_and_no_file_is_read_twice(model: Path, monkeypatch: pytest.MonkeyPatch):
    files, read = tensor_files(model), hashed(monkeypatch)
    assert len(files) > 1 and remembered_digest(model) is None
    digest = base_digest(model)
    assert digest == read_manifest(model).content_sha256
    assert read == files
    assert base_digest(model) == remembered_digest(model) == digest and read == files
    moved = model.rename(model.with_name("moved"))
    assert remembered_digest(moved) is None, "a path is part of what is remembered"
    assert base_digest(moved) == digest


def test_a_file_that_is_another_is_hashed_again_whatever_its_time_says(model: Path, monkeypatch: pytest.MonkeyPatch):
    digest = base_digest(model)
    last = tensor_files(model)[-1]
    before = last.stat()
    tensors = load_file(last)
    save_file({name: value + 1 for name, value in tensors.items()}, last, metadata={"format": "pt"})
    os.utime(last, ns=(before.st_atime_ns, before.st_mtime_ns))
    read = hashed(monkeypatch)
    assert open_checkpoint(model) and remembered_digest(model) is None
    assert base_digest(model) != digest and read == [last]
    with pytest.raises(InputError, match=r"has the digest [0-9a-f]{64}, expected training.lora.base_sha256"):
        check_base(model, digest)


def test_hashing_ends_at_its_time_and_goes_on_the_next(model: Path, monkeypatch: pytest.MonkeyPatch):
    """What was hashed in time is not read again: on a slow file system each `crossfed check` gets further."""
    files, read = tensor_files(model), hashed(monkeypatch)
    with pytest.raises(TimeoutError, match=r"was not read to its end in time"):
        base_digest(model, until=time.monotonic())
    assert read == files[:1]
    clock = iter([0.0, 0.0, 99.0])  # the first file takes two reads, the second is out of time
    with monkeypatch.context() as patch, pytest.raises(TimeoutError):
        patch.setattr(base_model.time, "monotonic", lambda: next(clock))
        base_digest(model, until=60.0)
    assert read == [files[0], files[0], files[1]]
    assert base_digest(model) == read_manifest(model).content_sha256
    assert read[3:] == files[1:]


def test_the_probe_does_not_keep_check_waiting(model: Path, monkeypatch: pytest.MonkeyPatch):
    assert probe.HASHING_SECONDS <= PROBE_SECONDS / 2
    size = sum(file.stat().st_size for file in tensor_files(model))
    monkeypatch.setattr(probe, "HASHING_SECONDS", 0.0)
    assert probe.base_model(model) == {"bytes": size, "sha256": None, "seconds": 0.0}
    digest = base_digest(model)
    assert probe.base_model(model) == {"bytes": size, "sha256": digest}, "what is remembered takes no time"


@pytest.mark.parametrize("content", ["no JSON", "[1, 2]", '{"a": 3}', '{"a": [["x"], "y"]}'])
def test_a_record_that_is_none_counts_for_nothing(model: Path, content: str):
    digest, folder = base_digest(model), user_cache()
    assert folder is not None
    (folder / NAME).write_text(content)
    assert remembered_digest(model) is None and base_digest(model) == digest
    assert remembered_digest(model) == digest, "it was written anew"


def test_a_record_that_others_could_write_is_not_believed(model: Path):
    base_digest(model)
    record = user_cache() / NAME  # type: ignore[operator]
    known = json.loads(record.read_text())
    assert len(known) == len(tensor_files(model))
    record.chmod(0o666)
    assert remembered_digest(model) is None


def test_the_command_prints_it(model: Path, tmp_path: Path):
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "facility.base_model", *words], cwd=ROOT, capture_output=True, text=True
        )

    digest = base_digest(model)
    assert command(str(model), "--expect", digest).stdout.strip() == digest
    other = command(str(model), "--expect", "0" * 64)
    assert other.returncode == 1 and "is another model, expected 0000" in other.stderr
    nothing = command(str(tmp_path / "nothing"))
    assert nothing.returncode == 2 and "is not a directory" in nothing.stderr and "Traceback" not in nothing.stderr
    with pytest.raises(CheckpointError):
        base_digest(tmp_path / "nothing")


@pytest.mark.parametrize(
    "command", [digest_of_base.main, digest_of_published.main], ids=["base_model", "publishing.digest"]
)
@pytest.mark.parametrize("given", ["", " ", "0" * 63, "0" * 65, "sha256:" + "0" * 64, "\x1b[2J"])
def test_what_is_no_digest_is_refused_where_one_is_expected(
    command: Callable[[], int], given: str, model: Path, monkeypatch: pytest.MonkeyPatch
):
    """With `--expect "$DIGEST"` of a shell that knows no such variable, every model was the expected one."""
    monkeypatch.setattr(sys, "argv", ["command", str(model), "--expect", given])
    with pytest.raises(InputError, match="--expect is .*, expected a (SHA-256 of 64 hexadecimal digits|value:)"):
        command()


def test_a_digest_in_capital_letters_is_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["command", str(model), "--expect", base_digest(model).upper()])
    assert digest_of_base.main() == 0
    assert capsys.readouterr().out.strip() == base_digest(model)
