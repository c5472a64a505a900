"""The best plan by simulation so far, and a record of what was tried."""

from __future__ import annotations

from typing import Any

import numpy as np

from coordinator.planning.emit import simulated_seconds
from coordinator.planning.stop import Stop
from coordinator.problem.objective import value
from coordinator.problem.problem import Problem
from facility.exchange.messages.plan import Plan


class Best:
    """Plans are offered; the simulator decides."""

    def __init__(self, problem: Problem, stop: Stop) -> None:
        self.problem, self.stop = problem, stop
        self.plan: Plan | None = None
        self.seconds = np.inf
        self.value = np.inf
        """Of the objective, less is better."""
        self.origin = ""
        self.tried: dict[str, dict[str, Any]] = {}
        self.seen: dict[Any, float] = {}

    def offer(self, plan: Plan, origin: str) -> float:
        """Simulate; keep the best. Returns its seconds, infinite where a memory is exceeded."""
        key = (
            plan.grid,
            plan.stage_units,
            plan.micro_batches,
            plan.micro_batch_samples,
            plan.schedule,
            plan.sync.name,
        )
        if key in self.seen:
            return self.seen[key]
        seconds = self.seen[key] = simulated_seconds(self.problem, plan)
        if np.isfinite(seconds):
            entry = self.tried.get(origin)
            if entry is None or seconds < entry["seconds"]:
                self.tried[origin] = {"what": origin, "seconds": seconds, "after_seconds": self.stop.used}
        worth = value(self.problem, plan, seconds)
        if worth < self.value * (1 - 1e-9):
            self.plan, self.seconds, self.value, self.origin = plan, seconds, worth, origin
        return seconds
