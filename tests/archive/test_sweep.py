"""Laws of what the coordinator removes from its working directory once a round is complete."""

from __future__ import annotations

import dataclasses
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.aggregation.settings import AggregationSettings
from coordinator.archive.rounds import Archive
from coordinator.archive.sweep import sweep_round
from coordinator.config.closing import ClosingSettings
from coordinator.config.settings import CoordinatorSettings
from coordinator.steps.start import start
from facility.exchange.files.durable import new_directory
from facility.exchange.files.sweep import ABANDONED_SECONDS, remove_transferred
from facility.exchange.messages.manifest import Manifest, write_manifest
from tests.archive.test_archive import close
from tests.examples import examples


def engine_directory(
    workdir: Path, name: str, *, kind: str, federation: str = "f", round: int, transferred: bool = False
) -> Path:
    """As a job makes it, or as a transfer brings it for a job."""
    holder = workdir / str(uuid.uuid4())
    directory = (holder / str(uuid.uuid4()) if transferred else holder) / name
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"x")
    write_manifest(directory, Manifest(kind=kind, federation=federation, round=round))  # type: ignore[arg-type]
    return directory


@settings(max_examples=examples(25), deadline=None)
@given(done=st.integers(0, 5), rounds=st.lists(st.integers(0, 6), min_size=1, max_size=6), transferred=st.booleans())
def test_what_is_needed_stays_and_what_is_over_goes(tmp_path_factory, done: int, rounds: list[int], transferred: bool):
    workdir = tmp_path_factory.mktemp("work")
    job = workdir / str(uuid.uuid4())
    job.mkdir()

    def made(name: str, round: int, federation: str = "f") -> Path:
        return engine_directory(workdir, name, kind=name, round=round, transferred=transferred, federation=federation)

    updates = [made("update", round) for round in rounds]
    models = [made("model", round) for round in rounds]
    others = made("update", 0, "other")
    removed = sweep_round(job, "f", done)
    assert [path.exists() for path in updates] == [round > done for round in rounds]
    assert [path.exists() for path in models] == [round >= done for round in rounds]
    assert others.exists() and job.exists()
    assert all(not path.parent.exists() for path in removed), "empty directories go with what they held"


def test_a_run_that_goes_on_leaves_models_to_jobs_of_a_killed_one(
    tmp_path: Path, pico_llama: Path, monkeypatch: pytest.MonkeyPatch
):
    """A facility on the coordinator's machine reads its model where the start step was handed it, by a link."""
    job = tmp_path / "work" / str(uuid.uuid4())
    job.mkdir(parents=True)
    monkeypatch.chdir(job)
    closing = ClosingSettings(quorum=1, late="carry")
    aggregation = AggregationSettings(maximum_staleness=2)
    carrying = CoordinatorSettings(
        federation="f", rounds=9, facilities=["a"], closing=closing, aggregation=aggregation, keep_rounds=3
    )
    archive = Archive(tmp_path / "archive")
    start(archive, pico_llama, carrying)
    for number in range(4):
        close(archive, number)
    models = [engine_directory(job.parent, "model", kind="model", round=number) for number in range(5)]
    assert start(archive, pico_llama, carrying)[1] == 4
    assert [path.exists() for path in models] == [False, False, True, True, True]
    start(archive, pico_llama, dataclasses.replace(carrying, closing=None, aggregation=AggregationSettings()))
    assert [path.exists() for path in models] == [False, False, False, False, True]


def test_nothing_is_removed_beside_a_directory_that_no_engine_made(tmp_path: Path):
    update = engine_directory(tmp_path, "update", kind="update", round=0)
    (tmp_path / "by-hand").mkdir()
    assert sweep_round(tmp_path / "by-hand", "f", 5) == [] and update.exists()


def test_a_link_to_a_directory_elsewhere_is_left_alone(tmp_path: Path):
    elsewhere = engine_directory(tmp_path / "elsewhere", "update", kind="update", round=0)
    workdir = tmp_path / "work"
    job = workdir / str(uuid.uuid4())
    job.mkdir(parents=True)
    (workdir / str(uuid.uuid4())).symlink_to(elsewhere.parent)
    inside = workdir / str(uuid.uuid4())
    inside.mkdir()
    (inside / "update").symlink_to(elsewhere)
    assert sweep_round(job, "f", 5) == [] and elsewhere.exists()


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, and nothing is done after it."""


def test_killed_at_any_removal_the_next_sweep_takes_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model whose manifest went first would stay for ever, with all its weights."""
    counted = 0

    def killing(original: Callable[..., None], last: int) -> Callable[..., None]:
        def remove(*args: Any, **rest: Any) -> None:
            nonlocal counted
            counted += 1
            if counted > last:
                raise Killed
            original(*args, **rest)

        return remove

    for last in range(1000):
        workdir = tmp_path / str(last)
        job = workdir / str(uuid.uuid4())
        job.mkdir(parents=True)
        over = [
            engine_directory(workdir, kind, kind=kind, round=0, transferred=transferred)
            for kind in ("update", "model")
            for transferred in (False, True)
        ]
        for directory in over:
            for name in ("a.safetensors", "z.safetensors", "inner/tokenizer.json"):
                (directory / name).parent.mkdir(exist_ok=True)
                (directory / name).write_bytes(b"x")
        needed = engine_directory(workdir, "model", kind="model", round=1, transferred=True)
        counted = 0
        with monkeypatch.context() as patched:
            for name in ("unlink", "rmdir"):
                patched.setattr(os, name, killing(getattr(os, name), last))
            try:
                sweep_round(job, "f", 1)
                break
            except Killed:
                pass
        sweep_round(job, "f", 1)
        left = [path for path in workdir.rglob("*") if path.is_file() and needed not in path.parents]
        assert left == [] and needed.exists(), last
    assert last > 20


def test_what_a_killed_step_had_begun_goes_once_it_is_abandoned(tmp_path: Path):
    job = tmp_path / str(uuid.uuid4())
    job.mkdir()

    def begun(directory: Path, age: float) -> Path:
        (directory / "model.safetensors").write_bytes(b"x")
        for path in (directory / "model.safetensors", directory):
            os.utime(path, (time.time() - age, time.time() - age))
        return directory

    places = [tmp_path / str(uuid.uuid4()) / f".update.{number}.tmp" for number in range(2)]
    for place in places:
        place.mkdir(parents=True)
    fresh, old = begun(places[0], 0.0), begun(places[1], 2 * ABANDONED_SECONDS)
    with new_directory(tmp_path / str(uuid.uuid4()) / "update") as living:
        begun(living, 2 * ABANDONED_SECONDS)
        assert sweep_round(job, "f", 0) == [old]
        assert living.exists() and fresh.exists() and not old.parent.exists()


def test_a_refused_update_goes_whatever_it_says_of_itself(tmp_path: Path):
    """One without a manifest, or of another federation or a round to come, is recognised by no sweep."""
    workdir = tmp_path / "work"
    job = workdir / str(uuid.uuid4())
    job.mkdir(parents=True)
    refused = engine_directory(workdir, "update", kind="update", federation="other", round=9, transferred=True)
    (refused / "manifest.json").unlink()
    assert remove_transferred(job, refused) and not refused.parent.exists()
    # What a job made, what lies elsewhere, and links to it are not copies of a transfer.
    made = engine_directory(workdir, "update", kind="update", round=0)
    elsewhere = engine_directory(tmp_path / "site", "update", kind="update", round=0, transferred=True)
    linked = workdir / str(uuid.uuid4()) / str(uuid.uuid4()) / "update"
    linked.parent.mkdir(parents=True)
    linked.symlink_to(elsewhere)
    above = workdir / str(uuid.uuid4()) / elsewhere.parent.name
    above.parent.mkdir()
    above.symlink_to(elsewhere.parent)
    for path in (made, elsewhere, linked, above / "update"):
        assert not remove_transferred(job, path) and path.exists()
