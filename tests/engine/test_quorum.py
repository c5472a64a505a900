"""A federation under StreamFlow whose rounds do not wait: for a slow facility, one that is away, or a killed engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.archive.rounds import Archive, FacilityRow, Wait
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from coordinator.rounds.late import LateJob, remembered_job
from tests.engine.engines import crossfed, killed_at, streamflow
from tests.federations import write_federation

OUTER = {"rule": "heloco+nesterov"}


def federate(root: Path, names: list[str], *, seconds: float = 0.0, count: int = 5, **rounds: Any) -> Path:
    """A federation of local facilities with a stand-in for the trainer, of which `slow` needs `seconds`."""
    rounds = {"count": count, "quorum": 2, "grace": 0, "late": "carry"} | rounds
    path = write_federation(root, names, rounds=rounds, keep_rounds=4)
    (root / "sites" / names[-1] / "dataset" / "seconds").write_text(str(seconds))
    stand_in(path)
    return path


def stand_in(path: Path) -> None:
    """Render the federation, with a stand-in for the trainer in its workflow."""
    write_rendered(read_federation(path))
    tool = path.parent.parent / "cwl" / "tools" / "train.cwl"
    tool.write_text(tool.read_text().replace("update]", "update, --module, tests.stand_in_trainer]", 1))


def rows_of(path: Path) -> list[FacilityRow]:
    return [row for entry in Archive(read_federation(path).archive_path).history() for row in entry.facilities]


def used(rows: list[FacilityRow], name: str) -> list[int]:
    """Rounds whose update of a facility was averaged, in the order in which they were."""
    return [row.round - row.staleness for row in rows if row.facility == name and row.status == "ok"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rounds_close_without_the_slow_one_whose_updates_count_later(tmp_path: Path):
    seconds = 40.0  # of two cores that others keep busy, too, five rounds of the others take less than five times this
    path = federate(tmp_path, ["a", "b", "slow"], seconds=seconds)
    result = streamflow(path, tmp_path / "engine", timeout=800)
    assert result.returncode == 0, result.stdout[-4000:]
    history = Archive(read_federation(path).archive_path).history()
    assert len(history) == 5
    rows = rows_of(path)
    for name in ("a", "b", "slow"):
        assert used(rows, name) == sorted(set(used(rows, name))), "no update twice, none after a later one"
    assert {row.status for row in rows} == {"ok", "late"}, "nobody failed"
    for entry in history:
        assert sum(row.status == "ok" for row in entry.facilities) >= 2, "a quorum"
    assert all(row.status == "ok" for row in history[-1].facilities), "the last round waits for all"
    assert history[0].wait == Wait(quorum=2, seconds=0.0) and history[-1].wait == Wait(quorum=2, seconds=None)
    assert len(used(rows, "slow")) < 5, "rounds did not wait for the slow one"
    late = [row for row in rows if row.staleness]
    assert late, "an update of an earlier round was averaged"
    assert all(row.loss_received is None for row in late), "what it received is not this round's model"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_facility_that_cannot_be_reached_holds_no_round_up(tmp_path: Path):
    """Nobody listens where `away` should be: from the first round to the end the others go on, and it is told."""
    path = federate(tmp_path, ["a", "b", "away"], count=2, away=1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        described = yaml.safe_load(path.read_text())
        described["facilities"][2] |= {
            "dataset": "/nowhere",
            "deployment": {
                "type": "ssh",
                "user": "nobody",
                "host": f"127.0.0.1:{port}",
                "workdir": str(tmp_path / "there"),
            },
        }
        path.write_text(yaml.safe_dump(described | {"final_evaluation": False}, sort_keys=False))
        write_rendered(read_federation(path))
        result = streamflow(path, tmp_path / "engine", timeout=800)
    assert result.returncode == 0, result.stdout[-4000:]
    rows = rows_of(path)
    assert used(rows, "a") == used(rows, "b") == [0, 1]
    away = [row for row in rows if row.facility == "away"]
    assert [row.status for row in away] == ["late", "late"] and all(
        "could not be reached" in row.reason for row in away
    )
    assert "round 0 closes without away: it could not be reached" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("moment", ["while its job runs", "after its update was handed on"])
def test_killed_the_engine_finds_a_late_update_again_and_uses_it_once(tmp_path: Path, moment: str):
    path, over = federate(tmp_path, ["a", "b", "slow"], count=12), tmp_path / "over"  # some go by until its job ends
    (tmp_path / "sites" / "slow" / "dataset" / "until").write_text(str(over))
    workdir = read_federation(path).workdir_path / "coordinator"
    process = crossfed("run", "--quiet", "-f", path, folder=tmp_path / "engine")
    handed = moment.startswith("after")
    left = _wait_for_late(workdir, process, handed=False)
    if handed:
        over.touch()
        left = _wait_for_late(workdir, process, handed=True)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    over.touch()
    before = len(Archive(read_federation(path).archive_path).rounds())
    assert left.round < before or not handed
    again = crossfed("run", "--quiet", "-f", path, folder=tmp_path / "engine")
    text, _ = again.communicate(timeout=800)
    assert again.returncode == 0, text
    rows = rows_of(path)
    for name in ("a", "b", "slow"):
        assert used(rows, name) == sorted(set(used(rows, name))), "no update twice, none after a later one"
    assert left.round in used(rows, "slow"), f"the update of round {left.round} was used:\n{text}"
    assert {row.status for row in rows} == {"ok", "late"}, "nothing was refused"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_federation_by_groups_runs_as_rounds_of_one_update_and_goes_on_after_a_kill(tmp_path: Path):
    """Fully asynchronous: every update a round. `groups:` of version 0.1 means that, and the run says so."""
    path = write_federation(
        tmp_path, ["a", "b", "slow"], rounds=6, groups={"minimum": 1, "window_seconds": 0}, aggregation=OUTER
    )
    (tmp_path / "sites" / "slow" / "dataset" / "seconds").write_text("8")
    stand_in(path)
    killed_at("round 1: complete", path, tmp_path / "engine")
    process = crossfed("run", "--quiet", "-f", path, folder=tmp_path / "engine")
    text, _ = process.communicate(timeout=800)
    assert process.returncode == 0, text
    assert "deprecated: groups is deprecated and read as `rounds: {count: 6, quorum: 1" in text and "staleness" in text
    history = Archive(read_federation(path).archive_path).history()
    assert len(history) == 6 and any(row.staleness for entry in history for row in entry.facilities)
    for name in ("a", "b", "slow"):
        assert used(rows_of(path), name) == sorted(set(used(rows_of(path), name))), "no update twice"
    failed = [row for row in rows_of(path) if row.status not in ("ok", "late")]
    assert not failed, f"nobody failed:\n{failed}\n{text}"
    assert Archive(read_federation(path).archive_path).read_note("evaluation")["after_round"] == 5


def _wait_for_late(workdir: Path, process: subprocess.Popen[str], *, handed: bool) -> LateJob:
    """The late job of `slow`, as soon as it is remembered, or its update handed on."""
    deadline = time.monotonic() + 600
    while (found := remembered_job(workdir, "slow")) is None or (found.handed is not None) != handed:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    return found
