"""Trackers get the curves of every complete round from the coordinator, and a tracker that fails ends nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.report.trackers import FOLDER, curves, track_round
from tests.report.made import made_archive


def test_tensorboard_holds_each_round_of_each_facility(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    archive = made_archive(tmp_path / "archive", facilities=2, rounds=3)
    history = archive.history()
    for entry in history:
        assert track_round(archive.path, "made", ["tensorboard"], entry) == []
    for run in ("global", "facility-00"):
        read = EventAccumulator(str(archive.path / FOLDER / f"made-{run}"))
        read.Reload()
        found = [(one.step, pytest.approx(one.value)) for one in read.Scalars("loss_received")]
        expected = [(entry.round, curves(entry)[run]["loss_received"]) for entry in history if run in curves(entry)]
        assert expected == found and len(found) >= 2


def test_a_tracker_that_is_not_there_is_reported_and_ends_nothing(tmp_path: Path):
    archive = made_archive(tmp_path / "archive", facilities=2, rounds=1)
    problems = track_round(archive.path, "made", ["no-such-tracker"], archive.history()[0])
    assert len(problems) == 1 and "no-such-tracker" in problems[0] and "tensorboard" in problems[0]
