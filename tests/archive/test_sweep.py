"""Laws of what the coordinator removes from its working directory once a round is complete."""

from __future__ import annotations

import uuid
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.archive.sweep import sweep_round
from facility.exchange.messages.manifest import Manifest, write_manifest
from tests.examples import examples


def engine_directory(workdir: Path, name: str, *, kind: str, federation: str = "f", round: int) -> Path:
    directory = workdir / str(uuid.uuid4()) / name
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"x")
    write_manifest(directory, Manifest(kind=kind, federation=federation, round=round))  # type: ignore[arg-type]
    return directory


@settings(max_examples=examples(25), deadline=None)
@given(done=st.integers(0, 5), rounds=st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_what_is_needed_stays_and_what_is_over_goes(tmp_path_factory, done: int, rounds: list[int]):
    workdir = tmp_path_factory.mktemp("work")
    job = workdir / str(uuid.uuid4())
    job.mkdir()
    updates = [engine_directory(workdir, "update", kind="update", round=round) for round in rounds]
    models = [engine_directory(workdir, "model", kind="model", round=round) for round in rounds]
    others = engine_directory(workdir, "update", kind="update", federation="other", round=0)
    removed = sweep_round(job, "f", done)
    assert [path.exists() for path in updates] == [round > done for round in rounds]
    assert [path.exists() for path in models] == [round >= done for round in rounds]
    assert others.exists() and job.exists()
    assert all(not path.parent.exists() for path in removed), "empty directories go with what they held"


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
