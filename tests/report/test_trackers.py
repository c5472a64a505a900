"""Trackers get the curves of every complete round from the coordinator, and a tracker that fails ends nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from statistics import fmean

import pytest

from coordinator.report.trackers import FOLDER, curves, track_round
from facility.exchange.messages.loss_curve import loss_curve
from tests.conftest import ROOT
from tests.report.made import made_archive

PACKAGES = ("mlflow==3.17.2", "wandb==0.31.0")
"""What was tested; none of them is needed by CrossFed."""


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


@pytest.mark.parametrize("steps", [7, 60, 100])
def test_the_training_loss_of_a_round_is_the_mean_of_its_steps(tmp_path: Path, steps: int):
    """Of 60 steps half of the points are of one step and half of two; each point counted the same."""
    losses = [9.0 * 0.9**number for number in range(steps)]
    entry = made_archive(tmp_path / "archive", facilities=1, rounds=1).history()[0]
    row = dataclasses.replace(entry.facilities[0], steps=steps, training_losses=loss_curve(losses))
    told = curves(dataclasses.replace(entry, facilities=[row]))[row.facility]["loss_training"]
    assert told == pytest.approx(fmean(losses), abs=1e-5)


def test_a_tracker_that_is_not_there_is_reported_and_ends_nothing(tmp_path: Path):
    archive = made_archive(tmp_path / "archive", facilities=2, rounds=1)
    problems = track_round(archive.path, "made", ["no-such-tracker"], archive.history()[0])
    assert len(problems) == 1 and "no-such-tracker" in problems[0] and "tensorboard" in problems[0]


@pytest.fixture(scope="module")
def with_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with MLflow and W&B from the package index; everything else is this environment's."""
    folder = tmp_path_factory.mktemp("trackers")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    (site / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    install = [python, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES]
    subprocess.run(install, check=True, cwd=folder)
    return python


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_what_the_packages_themselves_read_is_one_curve_a_run(tracker: str, with_packages: Path, tmp_path: Path):
    """Offline: no server, no key. Rounds are logged one by one, as the coordinator does, and stay one run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_"))}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [with_packages, "-m", "tests.report.tracked", tracker, tmp_path / "made"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["problems"] == [] and told["found"] == told["expected"] and len(told["found"]) == 3
    assert {path.name for path in tmp_path.iterdir()} <= {"made", ".config", ".cache", ".local", ".netrc"}
