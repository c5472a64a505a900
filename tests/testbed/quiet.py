"""Wait until a facility's jobs have ended."""

from __future__ import annotations

import contextlib
import pwd
from pathlib import Path

from coordinator.testbed import namespaces
from coordinator.testbed.command import wait_until
from coordinator.testbed.layout import Site


def wait_for_quiet(site: Site, seconds: float = 30) -> None:
    """Wait until no process of the facility's user runs. Raises `TryAgain`."""
    wait_until(lambda: not user_processes(site), seconds, f"end of the processes of {site.user}")


def user_processes(site: Site) -> list[int]:
    """Processes inside the facility that belong to its user."""
    uid = pwd.getpwnam(site.user).pw_uid
    found = []
    for pid in namespaces.processes(site):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}").stat().st_uid == uid:
                found.append(pid)
    return found
