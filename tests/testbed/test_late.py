"""Rounds that do not wait, over two Slurm clusters: a coordinator killed beside a late job, facilities that move."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.config.described import describe_federation
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from coordinator.rounds.acceptance import accept
from coordinator.rounds.late import LateJob, remembered_job
from tests.testbed.federation import ROOT, Run, federate, jobs
from tests.testbed.kill import kill_coordinator

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(800)]
CLOSING: dict[str, object] = {"quorum": 1, "grace": 0, "late": "carry"}


def change(run: Run, **changes: Any) -> None:
    """Edit federation.yml, as a person does who then types `crossfed run --accept`."""
    data = yaml.safe_load(run.file.read_text()) | changes
    run.file.write_text(yaml.safe_dump(data, sort_keys=False))
    federation = read_federation(run.file)
    write_rendered(federation)
    accept(run.archive, describe_federation(federation))


def used(run: Run, name: str) -> list[int]:
    """Rounds whose update of a facility was averaged, in the order in which they were."""
    rows = [row for entry in run.archive.history() for row in entry.facilities if row.facility == name]
    return [row.round - row.staleness for row in rows if row.status == "ok"]


def wait_for_late(run: Run, name: str, process: subprocess.Popen[bytes]) -> LateJob:
    workdir = read_federation(run.file).workdir_path / "coordinator"
    deadline = time.monotonic() + 240
    while (found := remembered_job(workdir, name)) is None:
        assert time.monotonic() < deadline and process.poll() is None, run.text()
        time.sleep(0.2)
    return found


def test_killed_beside_a_late_job_and_then_facilities_leave_and_join(testbed, material, tmp_path: Path):
    a, b = testbed.sites
    run = federate(
        testbed,
        tmp_path,
        *material,
        name="late",
        rounds={"count": 3, **CLOSING},
        prelude="if [ -e ~/slow ]; then sleep 30; fi",
    )
    (b.home / "slow").touch()
    command = [sys.executable, "-m", "tests.testbed.federation", str(testbed.root), str(run.file)]
    first = subprocess.Popen(
        command, cwd=ROOT, env=run.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert wait_for_late(run, "site-b", first).round == 0
    kill_coordinator(first)
    (b.home / "slow").unlink()
    assert run.run() == 0, run.text()
    assert run.archive.rounds() == [0, 1, 2]
    for name in ("site-a", "site-b"):
        assert used(run, name) == sorted(set(used(run, name))), "no update twice"
    assert used(run, "site-b")[0] == 0, "the update of the job that was late when the coordinator died"
    assert sum(record["JobState"] == "COMPLETED" for record in jobs(run, b)) >= len(used(run, "site-b"))

    facilities = yaml.safe_load(run.file.read_text())["facilities"]
    change(run, facilities=facilities[:1], rounds={"count": 4, **CLOSING})
    assert run.run() == 0, run.text()
    change(run, facilities=facilities, rounds={"count": 6, **CLOSING})
    assert run.run() == 0, run.text()
    by_round = {entry.round: {row.facility for row in entry.facilities} for entry in run.archive.history()}
    assert (by_round[3], by_round[5]) == ({"site-a"}, {"site-a", "site-b"})
    told = {entry.round: " ".join(entry.changes) for entry in run.archive.history()}
    assert "facilities[site-b]" in told[3] and "facilities[site-b]" in told[4]
    assert used(run, "site-b")[-1] in (4, 5), "the last round waited for it"
