"""Slow a facility's first job down for a while, so that on a fast machine too there is time to watch it at work."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.testbed import daemons
from coordinator.testbed.layout import Site, Testbed
from facility.exchange.messages.progress import FILE
from tests.testbed.quiet import user_processes

STOPPED_SECONDS, RUNNING_SECONDS = 0.9, 0.02
"""In turns, as long as jobs are slowed."""


@dataclass
class Pace:
    """Ranks are suspended most of the time until `seconds` after the first progress at their facility."""

    testbed: Testbed
    seconds: float
    since: float = field(default_factory=time.time)
    """Progress files from before are other jobs'."""
    begun: dict[str, float] = field(default_factory=dict)

    def hold(self, stop: threading.Event) -> None:
        """Work until told to stop; no process stays suspended."""
        while not stop.wait(RUNNING_SECONDS):
            ranks = [pid for site in self.testbed.sites if self._slowed(site) for pid in trainers(site)]
            try:
                send(ranks, signal.SIGSTOP)
                if ranks:
                    time.sleep(STOPPED_SECONDS)
            finally:
                send(ranks, signal.SIGCONT)

    def _slowed(self, site: Site) -> bool:
        if site.name not in self.begun:
            if not any(_changed(path) > self.since for path in (site.home / "work").glob(f"**/{FILE}")):
                return False
            self.begun[site.name] = time.monotonic()
        return time.monotonic() - self.begun[site.name] < self.seconds


def trainers(site: Site) -> list[int]:
    return [pid for pid in user_processes(site) if "-m facility.train" in daemons.title(pid)]


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
