"""A run asks its queues by one login a facility: sites count logins. A real sshd counts them."""

from __future__ import annotations

import getpass
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from coordinator.engine.kept_logins import kept_logins
from coordinator.engine.queues import Queue
from coordinator.engine.supervise import Limits, Supervisor, children
from facility.exchange.errors import TryAgain
from tests.streamflow_plugin.local_sshd import SSHD, Site
from tests.streamflow_plugin.local_sshd import site as site  # a fixture

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd here"),
    pytest.mark.parametrize(
        "site", ["ForceCommand echo crossfed-begins; echo 7 PENDING JobHeldUser"], indirect=True, ids=["queue"]
    ),
]


def queue_of(site: Site) -> Queue:
    site.sign("-1m:+1h")
    login = {"nodes": [f"127.0.0.1:{site.port}"], "username": getpass.getuser(), "sshKey": str(site.key)}
    return Queue(facility="a", kind="slurm", job_name="crossfed-f-a", ssh=login, directory=site.folder)


def logins(site: Site) -> int:
    return (site.folder / "sshd.log").read_text().count("Accepted publickey")


def test_a_run_that_looks_often_logs_in_once(site: Site, tmp_path: Path):
    told: list[str] = []
    run = Supervisor(
        command=lambda: [sys.executable, "-c", "import time; time.sleep(4)"],
        directory=tmp_path,
        environment=dict(os.environ),
        queues=[queue_of(site)],
        on_line=lambda line: None,
        on_stuck=lambda facility, job, reason, advice: told.append(job),
        rounds_done=lambda: 0,
        limits=Limits(look_seconds=0.3),
    )
    assert run.run()[0] == 0
    assert told == ["7"] and logins(site) == 1
    until = time.monotonic() + 20
    while children(site.process) and time.monotonic() < until:
        time.sleep(0.05)
    assert children(site.process) == [], "the connection ends with the run"


def test_a_connection_that_broke_between_two_questions_is_made_anew(site: Site):
    with kept_logins() as kept:
        queue = Queue(**{**vars(queue_of(site)), "logins": kept})
        assert [job.id for job in queue.jobs()] == ["7"] == [job.id for job in queue.jobs()]
        assert logins(site) == 1
        for session in children(site.process):
            os.kill(session, signal.SIGKILL)
        time.sleep(0.5)
        assert [job.id for job in queue.jobs()] == ["7"] and logins(site) == 2
        for process in [*children(site.process), site.process]:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.5)
        with pytest.raises(TryAgain, match="a does not answer"):
            queue.jobs()
