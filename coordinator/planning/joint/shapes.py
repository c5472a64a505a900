"""The shapes of the portfolio (stages x replicas, micro-batch size, schedule), each with its structured layouts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.planning.joint.cost import Cost, Layouts
from coordinator.planning.joint.every import every_layout
from coordinator.planning.joint.starts import grids, starts
from coordinator.planning.stop import Stop
from coordinator.problem.problem import Problem
from facility.exchange.errors import ConfigurationError
from facility.exchange.schedules.registry import is_interleaved

POOL, OUTSIDE = 32, 8
"""Layouts that a shape keeps at most, and those of them that exceed a memory."""


@dataclass
class Shape:
    """One shape of the portfolio."""

    cost: Cost
    pool: Layouts
    """Its best layouts so far: those within memory, then others; of each the best first."""
    worth: np.ndarray
    """Their cost by closed forms, in terms of the objective."""
    fits: bool
    """True if one is within memory; else their cost says how far they are from that, and is not a promise."""
    schedules: tuple[str, ...]
    """Schedules that its best layout is simulated under."""
    whole: bool = False
    """True if all its layouts were looked at: there is nothing to search."""
    bias: float = 1.0
    """Simulated over closed forms, of the layout that was simulated last."""

    @property
    def estimate(self) -> float:
        """Cost of its best layout that a simulation is expected to find."""
        return float(self.worth[0]) * self.bias


def sorted_pool(cost: Cost, layouts: Layouts, worth: np.ndarray) -> tuple[np.ndarray, bool]:
    """Which layouts to keep, in order, and whether one of them is within memory."""
    feasible = cost.feasible(layouts)
    order = np.lexsort((worth, ~feasible))
    near = order[feasible.sum() :][:OUTSIDE]  # the way to a better one may lead through a layout that does not fit
    return np.concatenate([order[: feasible.sum()][: POOL - len(near)], near]), bool(feasible.any())


def shapes_of(problem: Problem, stop: Stop) -> list[Shape]:
    """All allowed shapes that have a layout within memory (or close to it), with their structured layouts."""
    devices, units = len(problem.devices), len(problem.units)
    sizes = problem.whole_sizes
    schedules = [s for s in problem.schedules if not is_interleaved(s)] or ["1f1b"]
    depths = problem.stages or range(1, min(devices, units) + 1)
    found: list[Shape] = []
    for stages in depths:
        if stages > min(devices, units):
            continue
        most = min(devices // stages, problem.batch_samples // min(sizes))
        widths = problem.replicas or _widths(problem, most)
        for width in widths:
            if width > most:
                continue
            lines = grids(problem, stages, width)
            for samples in sizes:
                if problem.batch_samples // samples < width:
                    continue
                for schedule in schedules:
                    if found and stop.used > 0.4 * stop.seconds:
                        return found
                    cost = Cost(problem, stages, width, samples, schedule)
                    every = every_layout(cost)
                    pool = starts(cost, lines) if every is None else every
                    worth = cost.value(pool)
                    order, fits = sorted_pool(cost, pool, worth)
                    found.append(Shape(cost, pool.take(order), worth[order], fits, tuple(schedules), every is not None))
    if not found:
        raise ConfigurationError(
            f"no allowed shape fits {devices} devices, {units} units and {problem.batch_samples} samples: stages "
            f"{list(problem.stages) or 'any'}, replicas {list(problem.replicas) or 'any'}"
        )
    return found


def _widths(problem: Problem, most: int) -> list[int]:
    """Numbers of replicas to try where any is allowed: as many as fit; fewer where idle devices save cost."""
    if problem.objective == "device_hours":
        return sorted({most, *(r for r in (1, 2, 3, 4, most // 4, most // 2, most - 1) if 1 <= r <= most)})
    return sorted({most, *(r for r in (most - 1, most // 2) if r >= 1 and len(problem.devices) <= 16)})
