"""A run keeps the stated bounds on disk, in every moment, whatever the number of rounds."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from coordinator.archive.rounds import Archive
from coordinator.config.closing import LimitSettings
from coordinator.config.evaluation import ComparisonSettings
from coordinator.config.federation import Federation, read_federation
from coordinator.config.settings import CoordinatorSettings
from coordinator.engine.render import write_rendered
from coordinator.memory.figures import model_figures
from coordinator.preflight.coordinator import _held, _room
from coordinator.preflight.disk import IN_FLIGHT, coordinator_disk, facility_disk
from coordinator.steps.start import start
from facility.exchange.files.links import can_link
from tests.aggregation.updates import write_update
from tests.engine.engines import streamflow
from tests.federations import write_federation
from tests.pico import save_pico
from tests.steps.test_aggregate_step import close

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
    write_rendered(federation)
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


def test_models_that_stay_for_a_limit_or_a_comparison_are_counted(tmp_path: Path):
    """The best model beside those of `keep_rounds`; each facility's last update, and what it trained alone."""
    federation = read_federation(write_federation(tmp_path, ["a", "b"]))
    model = model_figures(federation.path(federation.model))
    training = {one.name: one.training for one in federation.facilities}

    def parts_of(**more: Any) -> dict[str, int]:
        return coordinator_disk(model, training, rule="mean", rounds=9, keep_rounds=1, **more).parts

    plain, best = parts_of(), parts_of(limited=True)
    assert plain["the best model"] == plain["models to be compared"] == 0
    assert best["the best model"] == best["the next model"] >= model.bytes
    updates = plain[IN_FLIGHT]
    assert parts_of(comparison=ComparisonSettings())["models to be compared"] == updates
    assert parts_of(comparison=ComparisonSettings(alone=True))["models to be compared"] == 2 * updates
    own = ComparisonSettings(updates=False, last_models=2)
    assert parts_of(comparison=own)["models to be compared"] == plain["the next model"]


def test_a_limit_keeps_one_model_more_than_keep_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Models below the archive as a round is there and nothing is pruned yet: initial, best, newest before, next."""
    limits = LimitSettings(node_hours=1000)
    settings = CoordinatorSettings(federation="f", rounds=9, facilities=["a"], keep_rounds=1, limits=limits)
    archive = Archive(tmp_path / "archive")
    seen: list[int] = []
    pruned = Archive.prune

    def watched(self: Archive, keep: int, *, also: int | None = None) -> None:
        seen.append(sum((path / "model").is_dir() for path in self.path.iterdir()))
        pruned(self, keep, also=also)

    monkeypatch.setattr(Archive, "prune", watched)
    model, _, _ = start(archive, save_pico(tmp_path / "model", dtype="bfloat16"), settings)
    for number, loss in enumerate((4.0, 2.0, 3.0, 3.0)):
        update = write_update(tmp_path / f"a{number}", model, "a", round=number, loss=loss, move=0.01)
        model, _, _ = close(archive, model, [update], settings, number)
    assert max(seen) == 4 == len(("initial", "the best", "keep_rounds", "the next"))


def test_rounds_that_were_set_aside_are_not_held(tmp_path: Path):
    for folder in ("round-0000", "rewound-20260101-000000/round-0001"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model.safetensors").write_bytes(bytes(100))
    assert _held(tmp_path) == 100


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
