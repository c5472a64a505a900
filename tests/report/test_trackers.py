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


def test_wandb_writes_its_runs_here_and_asks_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    archive = made_archive(tmp_path / "archive", facilities=1, rounds=2)
    for entry in archive.history():
        assert track_round(archive.path, "made", ["wandb"], entry) == []
    written = list((archive.path / FOLDER).rglob("run-made-global.wandb"))
    assert len(written) == 2 and all("offline-run-" in str(path) for path in written)
    told = b"".join(path.read_bytes() for path in written)
    for entry in archive.history():
        assert f"{curves(entry)['global']['loss_received']}".encode() in told
