"""Two federations of one account at once, and a job whose node does not answer while it is sent a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from coordinator.testbed import daemons
from coordinator.testbed.layout import Site
from facility.exchange.files.audit_log import verify_log
from tests.testbed.conftest import ssh
from tests.testbed.federation import Run, federate, jobs
from tests.testbed.gates import gated_sites, keys_of

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(600)]

HOME = "two-coordinators"
"""Where both coordinators have their gates."""


@contextmanager
def crossfed_runs(runs: list[Run]) -> Iterator[list[subprocess.Popen[str]]]:
    """A process for each, which does not outlive the block."""
    with ExitStack() as stack:
        processes = []
        for run in runs:
            words = [sys.executable, "-m", "coordinator.cli", "run", "--quiet", "-f", str(run.file)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            processes.append(stack.enter_context(subprocess.Popen(words, env=run.environment(), text=True, **pipes)))
            stack.callback(processes[-1].terminate)
        yield processes


@contextmanager
def held(site: Site) -> Iterator[None]:
    """Jobs of the facility do not begin their work before the block ends."""
    (site.home / "hold").touch()
    try:
        yield
    finally:
        (site.home / "hold").unlink()


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


ASKED = [
    "jobs crossfed-{other}-{site}",
    "cancel crossfed-{other}-{site}",
    "cancel-waiting crossfed-{other}-{site}",
    "cancel-ids {job}",
    "states {job}",
    "ending {job}",
    "output {job}",
    "list {work}",
    "get-tree {work}",
    "put-file {work}/stray 600",
    "remove {work}",
    "link {work} {own}/link",
    "get-file {gate}/policy.yml",
    "put-file {gate}/job.sh 600",
]
"""What a coordinator may ask of its own jobs and files, asked of another's."""


def asked(testbed, site: Site, federation: str, request: str) -> subprocess.CompletedProcess[str]:
    """A request with the key of a federation's gate."""
    line = ["ssh", "-F", "/dev/null", "-i", str(keys_of(testbed, federation).gate), "-o", "IdentitiesOnly=yes"]
    line += ["-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={testbed.known_hosts}", "-l", site.user, site.address]
    words = f"crossfed-gate {request}"
    return subprocess.run([*line, words], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


def gate_log(site: Site, federation: str) -> list[dict]:
    path = site.home / HOME / "gates" / federation / "gate" / "audit.jsonl"
    assert verify_log(path).broken == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


def neither_reaches_what_is_the_others(testbed, site: Site, jobs_at: dict[str, str]) -> None:
    """`jobs_at`: the running job of each federation here."""
    for own, other in (("x", "y"), ("y", "x")):
        seen = asked(testbed, site, own, f"jobs crossfed-{own}-{site.name}")
        assert seen.returncode == 0 and jobs_at[own] in seen.stdout and jobs_at[other] not in seen.stdout, seen
        for form in ASKED if own == "x" else ASKED[:2]:
            words = {"work": f"{site.home}/work-{other}", "own": f"{site.home}/work-{own}"}
            words |= {"gate": f"{site.home}/{HOME}/gates/{other}", "job": jobs_at[other]}
            request = form.format(other=other, site=site.name, **words)
            answer = asked(testbed, site, own, request)
            assert (answer.returncode, answer.stdout) == (77, ""), answer
            refused = [one for one in gate_log(site, own) if one["what"] == "refused"]
            assert refused[-1]["request"] == f"crossfed-gate {request}" and refused[-1]["reason"] in answer.stderr
        assert not [entry for entry in gate_log(site, other) if entry["key"] == keys_of(testbed, own).fingerprint]


def test_two_federations_of_one_account_run_at_once_and_a_job_that_is_being_signalled_has_not_ended(
    testbed, material, tmp_path: Path
):
    """squeue says SIGNALING while slurmd does not take the signal; the round waits for the job, which ends well.

    Behind gates, each of the two coordinators has its own in one home, and reaches nothing of the other's.
    """
    _, b = testbed.sites
    runs = [
        federate(
            testbed,
            tmp_path / name,
            *material,
            name=name,
            rounds=1,
            minimum=2,
            workdir=f"work-{name}",
            prelude="while [ -e ~/hold ]; do sleep 1; done",
            gates_home=HOME,
        )
        for name in "xy"
    ]
    with crossfed_runs(runs) as processes:
        with held(b):
            found = {name: wait_until_running(testbed, b, f"crossfed-{name}-site-b") for name in "xy"}
            seen = set()
            with hanging(b, "slurmd"):
                assert ssh(testbed, b, f"scancel -s CONT {found['x']}").returncode == 0
                deadline = time.monotonic() + 8
                while time.monotonic() < deadline:
                    seen.add(state_of(testbed, b, "crossfed-x-site-b")[1])
                    time.sleep(0.5)
            assert seen <= {"RUNNING", "SIGNALING"} and "SIGNALING" in seen
            if b.name in gated_sites():
                neither_reaches_what_is_the_others(testbed, b, found)
        texts = [process.communicate(timeout=400)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)
    assert not any("goes on without" in text or "starting again" in text for text in texts), texts
    for run in runs:
        assert len(run.archive.rounds()) == 1
        for site in testbed.sites:
            assert [record["JobState"] for record in jobs(run, site)] == ["COMPLETED"], "submitted once"
    if b.name in gated_sites():
        for name in "xy":
            assert [entry["round"] for entry in gate_log(b, name) if entry["what"] == "approved"] == [0]
