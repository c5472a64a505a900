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
from tests.testbed.gates import home_of

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


def ask(testbed, site: Site, federation: str, request: str) -> subprocess.CompletedProcess[str]:
    """A request with the key of a federation's gate."""
    key = testbed.root / "coordinator" / "gates" / federation / "gate"
    line = ["ssh", "-F", str(testbed.ssh_config), "-o", "IdentitiesOnly=yes", "-i", str(key), site.name, request]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


def test_two_federations_through_two_gates_of_one_account_and_neither_reaches_the_other(
    testbed, material, tmp_path: Path
):
    """Two coordinators, the second let in by `setup.sh --gate KEY --coordinator NAME`, both at work at once."""
    site = testbed.sites[1]
    everywhere = [one.name for one in testbed.sites]
    common = {"rounds": 1, "delay": 25, "minimum": 2, "gated": everywhere}
    one = federate(testbed, tmp_path / "one", *material, name="one", workdir="work-one", **common)
    two = federate(testbed, tmp_path / "two", *material, name="two", workdir="work-two", beside="one", **common)
    processes = [crossfed_run(run) for run in (one, two)]
    theirs = wait_until_running(testbed, site, f"crossfed-two-{site.name}")
    place = f"{site.home}/work-two"
    for request in (
        f"crossfed-gate jobs crossfed-two-{site.name}",
        f"crossfed-gate cancel crossfed-two-{site.name}",
        f"crossfed-gate cancel-ids {theirs}",
        f"crossfed-gate states {theirs}",
        f"crossfed-gate output {theirs}",
        f"crossfed-gate test -d {place}",
        f"crossfed-gate walk d {place}",
        f"crossfed-gate remove {place}",
        f"crossfed-gate make {place}/x",
        f"crossfed-gate test -f {site.home}/gate-one/gates/two/policy.yml",
    ):
        refused = ask(testbed, site, "one", request)
        assert refused.returncode == 77, (request, refused)
    texts = [process.communicate(timeout=400)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)
    logs = [
        ssh(testbed, site, f"cat ~/{home}/gate/audit.jsonl").stdout for home in (home_of("one"), home_of("two", "one"))
    ]
    assert all(logs)
    for run, other, log in ((one, "two", logs[0]), (two, "one", logs[1])):
        assert len(run.archive.rounds()) == 1
        assert f"crossfed-{other}-" not in "".join(line for line in log.splitlines() if "refused" not in line)
        for there in testbed.sites:
            assert [record["JobState"] for record in jobs(run, there)] == ["COMPLETED"], "submitted once"
