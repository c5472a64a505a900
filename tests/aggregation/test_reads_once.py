"""Whatever goes into a mean is read once, and verified by that reading; damage of our own files blames no facility."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.sources import DamagedUpdate
from coordinator.aggregation.verify import check_update
from facility.exchange.checkpoints.checkpoint import TensorEntry, open_checkpoint
from facility.exchange.checkpoints.delta import decode_update, encode_update, write_tensors
from facility.exchange.checkpoints.delta_parts import FILE, READ, HeldTensor, as_bytes
from facility.exchange.errors import ManifestError, UpdateRefused
from facility.exchange.files import streamed_digest
from facility.exchange.messages.manifest import read_manifest, verify_manifest
from facility.rounds.sealed import UNCHANGED, find_flaw, write_seal
from tests.aggregation import make
from tests.aggregation.make import aggregate

SETTINGS = AggregationSettings(rule="mean+nesterov", weights="equal", **make.UNBOUNDED)
SLACK = 300_000
"""Bytes of headers, manifests and reports."""


def tensors(seed: int) -> make.Tensors:
    return make.random_tensors(seed, {f"w{i}": (700, 1000) for i in range(3)}, torch.bfloat16, scale=1)


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*.safetensors"))


def read_by(act: Callable[[], object]) -> int:
    """Bytes that this process reads, by the kernel's count."""

    def counter() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    before = counter()
    act()
    return counter() - before


@pytest.fixture
def second_round(tmp_path: Path) -> tuple[Path, Path, list[Path]]:
    """Model and state after one round, and the updates of the next."""
    start = make.model(tmp_path / "start", tensors(0))
    first = [make.update(tmp_path / f"first{i}", tensors(i), base=start, facility=f"f{i}") for i in (1, 2)]
    out, state = tmp_path / "model", tmp_path / "state"
    aggregate(base=start, updates=first, out=out, settings=SETTINGS, state_out=state)
    base = tmp_path / "model"
    updates = [make.update(tmp_path / f"second{i}", tensors(i), base=base, facility=f"f{i}") for i in (3, 4)]
    return base, state, updates


def again(tmp_path: Path, base: Path, state: Path, updates: list[Path], **more: Any) -> None:
    out, state_out = tmp_path / "next", tmp_path / "next-state"
    more = {"verify_base": True, "verify_updates": True} | more
    aggregate(base=base, updates=updates, out=out, settings=SETTINGS, state_in=state, state_out=state_out, **more)


@pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc/self/io")
@pytest.mark.parametrize("waiting", [streamed_digest.MOST_WAITING, 0], ids=["", "nothing-waits"])
def test_a_round_reads_updates_model_and_state_once_and_nothing_that_it_wrote(
    tmp_path: Path, second_round, monkeypatch, waiting: int
):
    """Also where files are so large that nothing of them fits into what a digest may hold back."""
    monkeypatch.setattr(streamed_digest, "MOST_WAITING", waiting)
    base, state, updates = second_round
    needed = sum(map(size, (base, state, *updates)))
    found = read_by(lambda: again(tmp_path, base, state, updates, threads=0 if waiting else 1))
    assert needed <= found <= needed + SLACK
    assert verify_manifest(tmp_path / "next").kind == "model" and verify_manifest(tmp_path / "next-state")


@pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc/self/io")
def test_an_update_is_read_once_when_it_arrives(second_round, monkeypatch):
    monkeypatch.setattr(streamed_digest, "MOST_WAITING", 0)
    base, _, (update, _) = second_round
    opened, told = open_checkpoint(base), read_manifest(base)
    found = read_by(lambda: check_update(update, opened, told, "f3", told.round))
    assert size(update) <= found <= size(update) + SLACK


@pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc/self/io")
@pytest.mark.parametrize("encoding", ["delta-int8", "sparse"])
def test_nothing_is_read_again_that_encoding_or_decoding_wrote(
    second_round, monkeypatch, tmp_path: Path, encoding: str
):
    """But the message: its parts are not written in the order in which they lie in its file."""
    monkeypatch.setattr(streamed_digest, "MOST_WAITING", 0)
    base, _, (update, _) = second_round
    message, residual, out = tmp_path / "message", tmp_path / "unsent", tmp_path / "decoded"

    def encoded() -> None:
        made = encode_update(full=update, reference=base, encoding=encoding, out=message, residual_out=residual)
        write_seal(residual, made.residual_checksums)

    found = read_by(encoded)
    read = size(update) + size(base)
    before = read + read // 8 if encoding == "sparse" else 3 * 2 * 2 * READ  # which values, or tensors, are sent
    assert found <= before + read + size(message) + SLACK
    assert size(residual) > 2 * SLACK
    (residual / UNCHANGED).unlink()  # so that the digests are compared
    assert find_flaw(residual) == ""
    found = read_by(lambda: decode_update(message, reference=base, out=out))
    assert found <= 2 * size(message) + size(base) + SLACK
    assert verify_manifest(out).encoding == "full"


@pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc/self/io")
@pytest.mark.parametrize("encoding", ["delta-int8", "sparse"])
def test_of_an_update_in_memory_only_the_received_model_is_read(second_round, tmp_path: Path, encoding: str):
    base, _, (update, _) = second_round
    directory, kept = tmp_path / "message", tmp_path / "unsent"
    values = {entry.name: widened(update, entry) for entry in open_checkpoint(base).tensors.values()}

    def held(entry: TensorEntry) -> HeldTensor:
        array = values[entry.name]
        return HeldTensor(
            name=entry.name,
            file=directory,
            dtype="F32",
            shape=entry.shape,
            start=0,
            size=array.nbytes,
            values=lambda begin, count: as_bytes(array[begin : begin + count]),
        )

    for folder in (directory, kept):
        folder.mkdir()
    old = open_checkpoint(base)
    new = {name: held(entry) for name, entry in old.tensors.items()}
    found = read_by(lambda: write_tensors(directory, kept, old=old, new=new, encoding=encoding))
    before = size(base) + size(base) // 8 if encoding == "sparse" else 3 * 2 * READ
    assert found <= before + size(base) + size(directory) + SLACK
    encode_update(
        full=update, reference=base, encoding=encoding, out=tmp_path / "whole", residual_out=tmp_path / "left"
    )
    assert (directory / FILE).read_bytes() == (tmp_path / "whole" / FILE).read_bytes()


def widened(update: Path, entry: TensorEntry) -> np.ndarray:
    """The values of an update's tensor in float32."""
    return open_checkpoint(update).read(entry.name).float().numpy().reshape(-1)


@pytest.mark.parametrize("values", ["finite", "nan"])
@pytest.mark.parametrize("what", ["model", "state"])
def test_damage_of_our_own_files_is_named_and_blames_no_facility(tmp_path: Path, second_round, what: str, values: str):
    base, state, updates = second_round
    hurt = base / "model.safetensors" if what == "model" else state / "master" / "model.safetensors"
    damage(hurt, b"\xff" * 64 if values == "nan" else b"\x01" * 64)
    with pytest.raises(ManifestError, match="another sha256" if what == "model" else "another checksum"):
        again(tmp_path, base, state, updates, drop_refused=True)
    assert not (tmp_path / "next").exists() and not (tmp_path / "next-state").exists()


@pytest.mark.parametrize("content", [b"\x01" * 64, b"\xff" * 64], ids=["finite", "nan"])
def test_an_update_that_was_altered_on_its_way_is_refused_as_altered(second_round, content: bytes):
    base, _, (update, _) = second_round
    damage(update / "model.safetensors", content)
    told = read_manifest(base)
    with pytest.raises(UpdateRefused, match="another sha256"):
        check_update(update, open_checkpoint(base), told, "f3", told.round)


@pytest.mark.parametrize("count", [2, 3, 8], ids=["one-pass", "two-passes", "one-thread"])
@pytest.mark.parametrize("content", [b"\x01" * 64, b"\xff" * 64], ids=["finite", "nan"])
def test_an_altered_update_is_found_by_the_pass_that_reads_it_first(
    tmp_path: Path, second_round, count: int, content: bytes
):
    """Whatever the number of updates, nothing of it is in a model, and the caller learns whose it was."""
    base, state, _ = second_round
    updates = [make.update(tmp_path / f"u{i}", tensors(i), base=base, facility=f"f{i}") for i in range(count)]
    damage(updates[1] / "model.safetensors", content)
    with pytest.raises(DamagedUpdate, match="another sha256") as refusal:
        again(tmp_path, base, state, updates, drop_refused=True)
    assert refusal.value.facility == "f1"
    assert not (tmp_path / "next").exists() and not (tmp_path / "next-state").exists()


@pytest.mark.parametrize("count", [2, 3])
def test_values_that_are_not_finite_are_found_by_that_pass_too(tmp_path: Path, second_round, count: int):
    base, state, _ = second_round
    values = [tensors(i) for i in range(count)]
    values[1]["w2"][5, 7] = float("nan")
    updates = [make.update(tmp_path / f"u{i}", one, base=base, facility=f"f{i}") for i, one in enumerate(values)]
    with pytest.raises(DamagedUpdate, match="'w2' holds NaN or infinity"):
        again(tmp_path, base, state, updates, drop_refused=True)


@pytest.mark.parametrize("count", [2, 8])
def test_verifying_changes_no_bit(tmp_path: Path, second_round, count: int):
    base, state, _ = second_round
    updates = [make.update(tmp_path / f"u{i}", tensors(i), base=base, facility=f"f{i}") for i in range(count)]
    digests = []
    for verifies in (True, False):
        folder = tmp_path / str(verifies)
        folder.mkdir()
        again(folder, base, state, updates, verify_updates=verifies)
        digests.append(read_manifest(folder / "next").content_sha256)
    assert digests[0] == digests[1]


def damage(file: Path, content: bytes) -> None:
    with open(file, "r+b") as handle:
        handle.seek(-1_000_000, 2)
        handle.write(content)
