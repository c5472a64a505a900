"""Wait until a facility's jobs have ended."""

from __future__ import annotations

import contextlib
import pwd
import subprocess
from pathlib import Path

from coordinator.engine.queues import ANSWER_SECONDS
from coordinator.testbed import namespaces
from coordinator.testbed.command import wait_until
from coordinator.testbed.layout import Site
from facility.exchange.errors import TransientError


def wait_for_quiet(site: Site, seconds: float = ANSWER_SECONDS + 30) -> None:
    """Wait until no process of the facility's user runs. Raises `TransientError` that names those that do.

    A look at the queue may be under way as a run ends in this process: its session lasts `ANSWER_SECONDS` at most.
    """
    try:
        wait_until(lambda: not user_processes(site), seconds, f"end of the processes of {site.user}")
    except TransientError as error:
        pids = ",".join(map(str, user_processes(site)))
        command = ["ps", "-o", "pid=,ppid=,stat=,etimes=,args=", "-p", pids or "0"]
        left = subprocess.run(command, capture_output=True, text=True).stdout
        raise TransientError(f"{error}; left are\n{left}") from None


def user_processes(site: Site) -> list[int]:
    """Processes inside the facility that belong to its user."""
    uid = pwd.getpwnam(site.user).pw_uid
    found = []
    for pid in namespaces.processes(site):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}").stat().st_uid == uid:
                found.append(pid)
    return found
