"""The published search for placements, as a baseline: a memetic algorithm over balanced partitions.

Yuan et al. 2022, arXiv 2206.01288, section 3.3 ("GCMA") and github.com/DS3Lab/DT-FM (MIT licence),
`scheduler/heuristic_evolutionary_solver/scheduler.py`; written anew. A population of 100 random balanced partitions;
each trial crosses two parents at five devices with capacity repair, improves the child by cyclic moves (a stage gives
away the device that is closest to a neighbour of its own, to the stage where [mean pipeline cost to there] - [that
least cost] is largest; the receiving stage gives next, until a cycle closes), and puts it in place of the worse
parent.

Mended: the generator is really seeded; a child is rejected if it is worse than both parents (a comparison with a truth
value made that "than the first"); the last cycle counts too; parents differ; the matching that is emitted is the one
that was scored.
"""

from __future__ import annotations

import numpy as np

from coordinator.planning.placement.cost import Costs, best_order, bottleneck_matching
from coordinator.planning.stop import Stop

Curve = list[tuple[float, int, float]]
"""(seconds, evaluations, best cost so far)."""


def evolve(costs: Costs, stop: Stop, *, seed: int = 0, population: int = 100) -> tuple[np.ndarray, float, Curve]:
    """The best grid `[stage, replica]`, its cost, and how the best fell over time."""
    rng = np.random.default_rng(seed)
    count = costs.stages * costs.replicas
    members: list[np.ndarray] = []
    scores: list[float] = []
    best: tuple[float, list[np.ndarray]] | None = None
    curve: Curve = []
    trial = 0
    while not members or not stop(trial):
        if len(members) < population:
            child = rng.permutation(np.arange(count) % costs.stages)
        else:
            first, second = rng.choice(population, 2, replace=False)
            child = _improve(costs, _cross(costs, members[first], members[second], rng))
        score, order = _score(costs, child)
        trial += 1
        if best is None or score < best[0] - 1e-12:
            best = (score, [np.flatnonzero(child == stage) for stage in order])
            curve.append((stop.used, trial, score))
        if len(members) < population:
            members.append(child)
            scores.append(score)
            continue
        worse = int(first if scores[first] > scores[second] else second)
        if score <= scores[worse]:
            members[worse], scores[worse] = child, score
    assert best is not None
    grid = [best[1][0]]
    for row in best[1][1:]:
        grid.append(row[bottleneck_matching(costs.pipeline[np.ix_(grid[-1], row)])[1]])
    return np.stack(grid), best[0], curve


def _score(costs: Costs, labels: np.ndarray) -> tuple[float, list[int]]:
    """The published cost of a partition, all stage pairs matched and the order found exactly."""
    stages = [np.flatnonzero(labels == stage) for stage in range(costs.stages)]
    data = max(float(costs.data[np.ix_(row, row)].sum(axis=1).max()) for row in stages)
    weights = np.zeros((costs.stages, costs.stages))
    for i in range(costs.stages):
        for j in range(i):
            weights[i, j] = weights[j, i] = bottleneck_matching(costs.pipeline[np.ix_(stages[i], stages[j])])[0]
    value, order = best_order(weights)
    return data + value, order


def _cross(costs: Costs, first: np.ndarray, second: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Copy five labels of `first` into `second`; overfull stages give devices, in order, to the first with room."""
    child = second.copy()
    points = rng.choice(len(child), min(5, len(child)), replace=False)
    child[points] = first[points]
    size = np.bincount(child, minlength=costs.stages)
    for device in range(len(child)):
        if size[child[device]] > costs.replicas:
            size[child[device]] -= 1
            child[device] = int((size < costs.replicas).argmax())
            size[child[device]] += 1
    return child


class _Gains:
    """Of every stage: the device it would give away, and what each other stage would gain by taking it."""

    def __init__(self, weights: np.ndarray, labels: np.ndarray, stages: int, free: np.ndarray) -> None:
        member = np.eye(stages)[labels]
        own = labels[:, None] == labels[None, :]
        np.fill_diagonal(own, False)
        inner = np.where(own, weights, np.inf).min(axis=1)
        mean = (weights @ member) / np.maximum(member.sum(axis=0), 1)
        giving = np.where(member.T.astype(bool) & free[None, :], inner[None, :], np.inf)
        self.device = giving.argmin(axis=1)
        self.can = (labels[self.device] == np.arange(stages)) & free[self.device]
        least = np.where(np.isfinite(inner), inner, 0.0)[self.device]
        self.to = np.where(self.can[:, None], mean[self.device] - least[:, None], -np.inf)
        np.fill_diagonal(self.to, -np.inf)
        self.best = self.to.max(axis=1)


def _improve(costs: Costs, labels: np.ndarray) -> np.ndarray:
    """One pass: at most one cycle per stage, each device moved at most once; keeps the prefix with the largest gain.

    A cycle may be closed after any of its moves, by sending that device to the stage where the cycle began; it is
    closed where the sum of gains is largest (Kernighan and Lin 1970, for cycles).
    """
    stages, weights = costs.stages, costs.pipeline
    free, touched = np.ones(len(labels), dtype=bool), np.zeros(stages, dtype=bool)
    found, total, best_total, best = labels.copy(), 0.0, 0.0, labels
    for _ in range(stages):
        now = found.copy()
        gains = _Gains(weights, now, stages, free)
        start = source = int(gains.best.argmax())
        moves: list[tuple[int, int]] = []  # device, the stage it came from
        closed: list[float] = []  # sum of gains if the cycle closes with that move
        taken = 0.0
        while gains.can[source] and len(moves) < len(labels):
            device, target = int(gains.device[source]), int(gains.to[source].argmax())
            closed.append(taken + float(gains.to[source, start]) if moves else 0.0)
            taken += float(gains.best[source])
            moves.append((device, source))
            free[device], touched[target] = False, True
            now[device], source = target, target
            if source == start:
                break
            gains = _Gains(weights, now, stages, free)
        if not moves:
            break
        last = int(np.argmax(closed))
        for device, origin in moves[last + 1 :]:
            now[device] = origin
        now[moves[last][0]] = start
        found, total = now, total + closed[last]
        if total > best_total:
            best_total, best = total, found
        if touched.all():
            break
    return best
