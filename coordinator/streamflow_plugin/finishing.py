"""A job whose script has ended and that its scheduler does not let go yet: an epilog of minutes, a node that hangs."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from coordinator.schedulers.scheduler import BatchScheduler
from coordinator.streamflow_plugin.problems import report_problem

FINISHING_SECONDS = 20.0
"""How long a scheduler may clear up after a job before that is reported."""


class Finishing:
    """What is known of such jobs of one facility."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        """By job: since when, or infinity once that was reported."""

    def see(self, states: Mapping[str, str], now: float, scheduler: BatchScheduler, deployment: str) -> None:
        """Report each job that its scheduler has been clearing up after for long, once: nothing else is heard of it."""
        for job, state in states.items():
            if state not in scheduler.finishing:
                self._since.pop(job, None)
            elif now - self._since.setdefault(job, now) >= FINISHING_SECONDS:
                self._since[job] = math.inf
                subject = f"{scheduler.title} of {deployment}"
                report_problem(
                    f"job {job} has ended its work; {subject} still clears up after it ({state}); waiting", logging.INFO
                )
