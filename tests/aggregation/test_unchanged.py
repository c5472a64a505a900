"""Files that a round does not change are linked into the next model, and read once as long as nobody writes to them."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from coordinator.aggregation import unchanged
from coordinator.aggregation.record import RoundRecord
from coordinator.aggregation.settings import AggregationSettings
from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.checkpoint import ADAPTER, SINGLE
from facility.exchange.errors import ManifestError
from facility.exchange.messages.manifest import read_manifest, verify_manifest
from tests.aggregation import make
from tests.aggregation.make import aggregate
from tests.aggregation.test_lora import adapter_update
from tests.aggregation.test_reads_once import SLACK, read_by, size
from tests.aggregation.test_stated_norms import states

SETTINGS = AggregationSettings(rule="mean+nesterov", weights="equal")
LAYER = "base_model.model.layer.{}.weight"
BODY = {"layer.weight": torch.ones(1000, 900, dtype=torch.bfloat16), "steps": torch.arange(3)}
BASE_FILE = SINGLE
linux = pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc/self/io")


def adapters(seed: int) -> make.Tensors:
    shapes = {LAYER.format("lora_A"): (4, 900), LAYER.format("lora_B"): (1000, 4)}
    return make.random_tensors(seed, shapes, torch.float32)


def a_round(root: Path, base: Path, state: Path | None, *, stating: bool = False) -> RoundRecord:
    """Of three facilities; writes `model` and `state` below `root`."""
    number = read_manifest(base).round
    updates = [adapter_update(root / f"u{i}", adapters(10 * number + i), base, f"f{i}") for i in range(3)]
    if stating:
        updates = [states(update, base) for update in updates]
    return aggregate(
        base=base,
        updates=updates,
        out=root / "model",
        settings=SETTINGS,
        state_in=state,
        state_out=root / "state",
        verify_base=True,
        verify_updates=True,
    )


@pytest.fixture
def rounds(tmp_path: Path) -> list[Path]:
    """Folders of two rounds from a model that was left alone long enough; each has `model` and `state`."""
    start = make.model(tmp_path / "start", BODY)
    settled(start / "model.safetensors")
    folders = [tmp_path / "0", tmp_path / "1"]
    base, state = start, None
    for folder in folders:
        a_round(folder, base, state)
        base, state = folder / "model", folder / "state"
    return folders


def settled(file: Path) -> None:
    then = time.time() - 60
    os.utime(file, (then, then))


def test_the_base_is_one_file_in_all_rounds(tmp_path: Path, rounds: list[Path]):
    first = (tmp_path / "start" / "model.safetensors").stat()
    for folder in rounds:
        assert (folder / "model" / BASE_FILE).stat().st_ino == first.st_ino
        assert verify_manifest(folder / "model").kind == "model" and verify_manifest(folder / "state")
        got = make.read_all(folder / "model")
        assert all(torch.equal(got[name], value) for name, value in BODY.items()) and len(got) == 4


@linux
@pytest.mark.skipif(native.library() is None, reason="norms are stated by the compiled kernel")
def test_a_round_of_adapters_reads_and_writes_adapters_alone(tmp_path: Path, rounds: list[Path]):
    base, state, folder = rounds[1] / "model", rounds[1] / "state", tmp_path / "2"
    again, records = tmp_path / "again", list[RoundRecord]()
    read = read_by(lambda: records.append(a_round(folder, base, state, stating=True)))
    made = read_by(lambda: [states(adapter_update(again / f"u{i}", adapters(i), base, "f"), base) for i in range(3)])
    sources = [state, *folder.glob("u*")]
    needed = sum(map(size, sources)) + (base / ADAPTER).stat().st_size
    assert read - made <= needed + SLACK < needed + size(base)
    (one,), values = records, sum(tensor.numel() for tensor in adapters(0).values())
    assert one.bytes_read == 4 * values * (1 + 3 + 2), "model, three updates, master and velocity, in one pass"


@linux
@pytest.mark.parametrize("how", ["rewritten", "restored", "not noted", "just written"])
def test_a_file_that_may_be_another_is_read_again(
    tmp_path: Path, rounds: list[Path], how: str, monkeypatch: pytest.MonkeyPatch
):
    """What was just written is not noted either: the next write may bear the same time."""
    monkeypatch.setattr(unchanged, "SETTLED_NS", 30 * 10**9)
    base, state = rounds[1] / "model", rounds[1] / "state"
    file = base / BASE_FILE
    if how == "rewritten":
        file.write_bytes(file.read_bytes())
    elif how == "restored":
        content, times = file.read_bytes(), file.stat()
        file.unlink()
        file.write_bytes(content)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif how == "not noted":
        state = None
    else:
        os.utime(file)
    found = read_by(lambda: a_round(tmp_path / "2", base, state))
    assert found >= file.stat().st_size
    assert (tmp_path / "2" / "state" / unchanged.NAME).exists() == (how in ("restored", "not noted"))


def test_a_base_that_was_altered_is_found_and_no_model_is_made(tmp_path: Path, rounds: list[Path]):
    base, state = rounds[1] / "model", rounds[1] / "state"
    with open(base / BASE_FILE, "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(b"\x01" * 64)
    with pytest.raises(ManifestError, match=f"{BASE_FILE} has another sha256"):
        a_round(tmp_path / "2", base, state)
    assert not (tmp_path / "2" / "model").exists() and not (tmp_path / "2" / "state").exists()


@pytest.mark.parametrize("content", ["{}", "nothing", '{"format": 1, "files": [{"inode": -1}]}', '{"format": 2}'])
def test_a_note_that_says_nothing_is_no_note(tmp_path: Path, content: str):
    (tmp_path / unchanged.NAME).write_text(content)
    assert unchanged.read_unchanged(tmp_path) == {}


def test_without_links_the_next_model_has_the_same_bytes(
    tmp_path: Path, rounds: list[Path], monkeypatch: pytest.MonkeyPatch
):
    base, state = rounds[1] / "model", rounds[1] / "state"
    a_round(tmp_path / "linked", base, state)

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(unchanged.os, "link", refuse)
    read = read_by(lambda: a_round(tmp_path / "copied", base, state))
    assert (base / BASE_FILE).stat().st_size <= read < 2 * (base / BASE_FILE).stat().st_size
    linked, copied = (tmp_path / how / "model" / BASE_FILE for how in ("linked", "copied"))
    assert linked.stat().st_ino != copied.stat().st_ino
    assert make.read_all(linked.parent).keys() == make.read_all(copied.parent).keys()
    assert verify_manifest(copied.parent) and not (tmp_path / "copied" / "state" / unchanged.NAME).exists()


def test_files_that_the_federation_leaves_out_are_linked_and_others_are_not(tmp_path: Path):
    tensors = {name: torch.full((1000, 300), float(i)) for i, name in enumerate(["frozen", "trained"])}
    base = make.model(tmp_path / "base", tensors, shard_bytes=1_000_000)
    moved = [{name: t + 1 for name, t in tensors.items()} for _ in range(2)]
    updates = [make.update(tmp_path / f"u{i}", t, base=base, facility=f"f{i}") for i, t in enumerate(moved)]
    settings = AggregationSettings(rule="mean", weights="equal", exclude=["frozen"])
    aggregate(base=base, updates=updates, out=tmp_path / "out", settings=settings, state_out=tmp_path / "state")
    places = json.loads((base / "model.safetensors.index.json").read_text())["weight_map"]
    for name, alike in (("frozen", True), ("trained", False)):
        one, two = (folder / places[name] for folder in (base, tmp_path / "out"))
        assert (one.stat().st_ino == two.stat().st_ino) is alike
    assert verify_manifest(tmp_path / "out")
