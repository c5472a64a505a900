"""A run keeps the stated bounds on disk, in every moment, whatever the number of rounds."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from coordinator.archive.rounds import Archive
from coordinator.config.federation import Federation, read_federation
from coordinator.engine.render import write
from coordinator.memory.figures import model_figures
from coordinator.preflight.coordinator import _held, _room
from coordinator.preflight.disk import IN_FLIGHT, coordinator_disk, facility_disk
from facility.exchange.files.links import can_link
from tests.engine.engines import streamflow
from tests.federations import write_federation

SMALL = 60_000
"""Bytes of a file from which it counts: weights and states do, manifests and logs do not."""


class Watch(threading.Thread):
    """The largest sum of weights below each folder so far; files that are linked twice count once."""

    def __init__(self, folders: list[Path]) -> None:
        super().__init__(daemon=True)
        self.most = dict.fromkeys(folders, 0)
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            for folder in self.most:
                self.most[folder] = max(self.most[folder], weights_below(folder))


def weights_below(folder: Path) -> int:
    found: dict[int, int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(place, name))
            except OSError:
                continue
            if status.st_size > SMALL and name.endswith(".safetensors"):
                found[status.st_ino] = status.st_size
    return sum(found.values())


def bounds(federation: Federation) -> tuple[int, int, int]:
    """At most in the archive, in a facility's state, and in the work directory that all share here."""
    model = model_figures(federation.path(federation.model))
    training = {one.name: one.training for one in federation.facilities}
    coordinator = coordinator_disk(
        model,
        training,
        rule=federation.aggregation.rule,
        rounds=federation.rounds,
        keep_rounds=federation.keep_rounds,
        links=True,
    )
    facilities = [facility_disk(model, one) for one in training.values()]
    files = [one.parts["models"] + one.parts["update"] for one in facilities]
    states = [one.bytes - held + one.parts["update"] for one, held in zip(facilities, files, strict=True)]
    return coordinator.without(IN_FLIGHT).bytes, max(states), coordinator.parts[IN_FLIGHT] + sum(files)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("adapters", [{}, {"lora": {"rank": 4}}], ids=["whole models", "adapters"])
def test_five_rounds_keep_the_bounds_of_two(tmp_path: Path, adapters: dict[str, Any]):
    size = {"hidden_size": 96, "intermediate_size": 192, "vocab_size": 2048}
    training = {"steps": 1} | adapters
    path = write_federation(tmp_path, ["a", "b"], training=training, rounds=5, keep_rounds=1, size=size)
    federation = read_federation(path)
    write(federation)
    archive, states, work = bounds(federation)
    folders = {tmp_path / "archive": archive, tmp_path / "work": work}
    folders |= {tmp_path / "sites" / name: states for name in ("a", "b")}
    watch = Watch(list(folders))
    watch.start()
    result = streamflow(path, tmp_path / "engine", timeout=500)
    watch.ended.set()
    watch.join()
    assert result.returncode == 0, result.stdout[-3000:]
    assert len(Archive(federation.archive_path).rounds()) == 5
    overhead = 1.05  # headers of files
    assert {str(f): most for f, most in watch.most.items() if most > overhead * folders[f]} == {}
    assert all(most > 0 for most in watch.most.values())


@pytest.mark.parametrize("short", [0, 1])
def test_a_disk_one_byte_below_the_bound_is_refused_before_the_first_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: int
):
    federation = read_federation(write_federation(tmp_path, ["a", "b"]))
    model = model_figures(federation.path(federation.model))
    training = {one.name: one.training for one in federation.facilities}
    need = coordinator_disk(model, training, rule=federation.aggregation.rule, rounds=2, keep_rounds=3).bytes

    class Usage:
        free = need - short

    monkeypatch.setattr("coordinator.preflight.coordinator.shutil.disk_usage", lambda _: Usage)
    row = _room(federation, model)
    assert (row.verdict == "ok") == (short == 0), row
    assert "the run needs up to" in row.found


def test_what_several_rounds_share_is_held_once(tmp_path: Path):
    first, second = tmp_path / "round-0000" / "base.safetensors", tmp_path / "round-0001" / "base.safetensors"
    for path in (first, second):
        path.parent.mkdir()
    first.write_bytes(bytes(1000))
    os.link(first, second)
    second.with_name("adapters.safetensors").write_bytes(bytes(10))
    assert _held(tmp_path) == 1010


def test_whether_a_place_has_hard_links_is_found_out_there_and_leaves_nothing(tmp_path: Path):
    assert can_link(tmp_path) and not list(tmp_path.iterdir())
    assert not can_link(tmp_path / "absent")
