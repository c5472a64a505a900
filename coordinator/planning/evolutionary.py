"""The published search for placements, as a baseline: a memetic algorithm over balanced partitions.

Yuan et al. 2022, arXiv 2206.01288, section 3.3 ("GCMA") and github.com/DS3Lab/DT-FM (MIT licence),
`scheduler/heuristic_evolutionary_solver/scheduler.py`; written anew. A population of 100 random balanced partitions; each
trial crosses two parents at five random devices with capacity repair, improves the child by one pass of cyclic moves (a device
leaves a stage for the one where the gain [mean pipeline cost to there] - [least pipeline cost inside its own] is largest), and
puts it in place of the worse parent unless it is worse than both. Mended: the generator is really seeded, the rejection test
compares scores, and the matching that is emitted is the one that was scored.
"""

from __future__ import annotations

import numpy as np

from .place_cost import Costs, best_order, bottleneck_matching
from .stop import Stop

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
    """Five labels of `second` copied into `first`; stages then too full give devices to those too empty."""
    child = first.copy()
    points = rng.choice(len(child), min(5, len(child)), replace=False)
    child[points] = second[points]
    fixed = set(points.tolist())
    size = np.bincount(child, minlength=costs.stages)
    for device in rng.permutation(len(child)):
        if size[child[device]] > costs.replicas and int(device) not in fixed:
            size[child[device]] -= 1
            child[device] = int(size.argmin())
            size[child[device]] += 1
    for device in points:
        if size[child[device]] > costs.replicas:
            size[child[device]] -= 1
            child[device] = int(size.argmin())
            size[child[device]] += 1
    return child


def _improve(costs: Costs, labels: np.ndarray) -> np.ndarray:
    """One pass of cyclic moves: cycles of devices, each taking the place of the next, every device moved at most once.

    Each step takes the largest gain; a cycle closes when the best move leads back to the stage it began in, or when no stage
    is left. Of all cycles the prefix with the largest sum of gains is kept (Kernighan and Lin 1970).
    """
    labels = labels.copy()
    weights = costs.pipeline + np.where(np.eye(len(labels), dtype=bool), np.inf, 0.0)
    locked = np.zeros(len(labels), dtype=bool)
    total = best_total = 0.0
    best = labels.copy()
    while True:
        member = np.eye(costs.stages, dtype=bool)[labels]
        inner = np.where(labels[:, None] == labels[None, :], weights, np.inf).min(axis=1)
        gain = costs.pipeline @ member / costs.replicas - inner[:, None]
        gain[member] = -np.inf
        gain[locked] = -np.inf
        device, target = (int(n) for n in np.unravel_index(int(gain.argmax()), gain.shape))
        if not np.isfinite(gain[device, target]):
            break
        start = int(labels[device])
        cycle, visited, cycle_gain = [device], {start}, float(gain[device, target])
        while target != start:
            visited.add(target)
            inside = np.flatnonzero((labels == target) & ~locked)
            inside = inside[~np.isin(inside, cycle)]
            if not len(inside):
                break
            options = gain[inside].copy()
            options[:, [s for s in visited if s != start]] = -np.inf
            row, column = (int(n) for n in np.unravel_index(int(options.argmax()), options.shape))
            cycle.append(int(inside[row]))
            cycle_gain += float(options[row, column])
            target = column
        locked[cycle] = True
        if len(cycle) < 2:
            continue
        labels[cycle] = labels[[*cycle[1:], cycle[0]]]
        total += cycle_gain
        if total > best_total * (1 + 1e-12):
            best_total, best = total, labels.copy()
    return best
