"""Two federations of one account at once, and a job whose node does not answer while it is sent a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.testbed import daemons
from coordinator.testbed.layout import Site
from tests.testbed.conftest import ssh
from tests.testbed.federation import Run, federate, jobs

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(600)]


def crossfed_run(run: Run) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "coordinator.cli", "run", "--quiet", "-f", str(run.file)]
    return subprocess.Popen(words, env=run.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@contextmanager
def hanging(site: Site, service: str) -> Iterator[None]:
    """The service's processes are stopped, not ended: their connections stay open, and nothing is answered."""
    pids = [found for file in daemons.pid_files(site, service) if (found := daemons.pid(file))]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def state_of(testbed, site: Site, name: str) -> tuple[str, str]:
    """Id and state of the job of this name; empty where there is none."""
    words = ssh(testbed, site, f"squeue -h -n {name} -o '%i %T'").stdout.split()
    return (words[0], words[1]) if len(words) == 2 else ("", "")


def wait_until_running(testbed, site: Site, name: str, seconds: float = 180) -> str:
    deadline = time.monotonic() + seconds
    while (found := state_of(testbed, site, name))[1] != "RUNNING":
        assert time.monotonic() < deadline, f"{name} is {found}"
        time.sleep(0.5)
    return found[0]


def test_two_federations_of_one_account_run_at_once_and_a_job_that_is_being_signalled_has_not_ended(
    testbed, material, tmp_path: Path
):
    """squeue says SIGNALING while slurmd does not take the signal; the round waits for the job, which ends well."""
    _, b = testbed.sites
    runs = [federate(testbed, tmp_path / name, *material, name=name, rounds=1, delay=25, minimum=2) for name in "xy"]
    processes = [crossfed_run(run) for run in runs]
    job = wait_until_running(testbed, b, "crossfed-x-site-b")
    seen = set()
    with hanging(b, "slurmd"):
        assert ssh(testbed, b, f"scancel -s CONT {job}").returncode == 0
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline:
            seen.add(state_of(testbed, b, "crossfed-x-site-b")[1])
            time.sleep(0.5)
    assert seen <= {"RUNNING", "SIGNALING"} and "SIGNALING" in seen
    texts = [process.communicate(timeout=400)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)
    assert not any("goes on without" in text or "starting again" in text for text in texts), texts
    for run in runs:
        assert len(run.archive.rounds()) == 1
        for site in testbed.sites:
            assert [record["JobState"] for record in jobs(run, site)] == ["COMPLETED"], "submitted once"
