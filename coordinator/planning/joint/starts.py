"""Layouts to begin from: devices in line by closeness or by speed, folded into grids, layers split exactly for each."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from coordinator.planning.joint.cost import Cost, Layouts
from coordinator.problem.problem import Problem


def device_lines(problem: Problem) -> list[np.ndarray]:
    """Orders of all devices: as numbered, by clusters of closeness, by speed, by cluster and speed."""
    count = len(problem.devices)
    numbers = np.arange(count)
    speed = problem.factors.mean(axis=1)
    lines = [numbers]
    labels = numbers * 0
    if count > 2:
        typical = float(np.median(problem.per_unit("activation_bytes"))) + 1.0
        distance = problem.latency + typical / problem.bandwidth
        distance = distance + distance.T
        np.fill_diagonal(distance, 0.0)
        distance += 1e-12 * distance.max() * np.abs(numbers[:, None] - numbers[None, :]) / count
        np.fill_diagonal(distance, 0.0)
        tree = linkage(squareform(distance, checks=False), "average")
        leaves = leaves_list(tree)
        lines.append(leaves)
        heights = np.maximum(tree[:, 2], 1e-300)
        level = int(np.diff(np.log(heights)).argmax()) if len(heights) > 1 else 0
        labels = _labels(tree, count, float(heights[level]) * 1.0000001)
        place = np.empty(count, dtype=int)
        place[leaves] = numbers
        first = np.array([place[labels == label].min() for label in labels])
        lines.append(np.lexsort((place, speed, first)))
        lines.append(np.lexsort((place, first, speed)))
    lines.append(np.lexsort((numbers, speed)))
    lines.append(np.lexsort((labels, speed))[::-1].copy())
    unique = {tuple(line.tolist()): line for line in lines}
    return list(unique.values())


def _labels(tree: np.ndarray, count: int, level: float) -> np.ndarray:
    from scipy.cluster.hierarchy import fcluster

    return np.asarray(fcluster(tree, level, "distance")) if count > 1 else np.zeros(1, dtype=int)


def grids(problem: Problem, stages: int, replicas: int) -> list[np.ndarray]:
    """Device lines `[device]` whose first stages x replicas entries, row by row, are the grid."""
    found = []
    for line in device_lines(problem):
        used, idle = line[: stages * replicas], line[stages * replicas :]
        for height in {h for h in (1, 2, 4, stages) if h <= stages and stages % h == 0}:
            pieces = used.reshape(stages // height, replicas, height).transpose(0, 2, 1).reshape(-1)
            found.append(np.concatenate([pieces, idle]))
    unique = {tuple(line.tolist()): line for line in found}
    return list(unique.values())


def even_cuts(units: int, stages: int) -> np.ndarray:
    """Stages whose numbers of units differ by one at most."""
    return np.array([units * s // stages for s in range(stages + 1)])


def even_share(total: int, replicas: int) -> np.ndarray:
    """Micro-batches whose numbers differ by one at most."""
    return np.array([total // replicas + (r < total % replicas) for r in range(replicas)])


def share_by_speed(cost: Cost, grid: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Micro-batches in proportion to the speed of each pipeline, at least one each, exact in sum."""
    work = cost.forward[grid, cuts[1:, None]] - cost.forward[grid, cuts[:-1, None]]
    work = work + cost.backward[grid, cuts[1:, None]] - cost.backward[grid, cuts[:-1, None]]
    period = np.maximum(work.max(axis=0), 1e-300)
    # Nearly there at once, by the speeds; the rest one by one where it costs least.
    poured = (cost.micro_batches - cost.replicas) / (1 / period).sum() / period
    share = np.maximum(1, np.floor(poured).astype(int))
    while share.sum() > cost.micro_batches:
        share[int(np.where(share > 1, share * period, -1.0).argmax())] -= 1
    for _ in range(cost.micro_batches - int(share.sum())):
        share[int(((share + 1) * period).argmin())] += 1
    return share


def best_cuts(cost: Cost, grid: np.ndarray, share: np.ndarray) -> np.ndarray | None:
    """The exact split minimising the busiest device's load for a fixed grid, within memory, no stage empty.

    All replicas of a stage hold the same units, so a stage is as slow as its slowest device; bisection over the
    bottleneck with greedy extension, as in `exact.contiguous`.
    """
    stages, units = cost.stages, cost.units
    rounds = share.max()
    weight = (share / rounds)[None, :, None]
    time = ((cost.forward[grid] + cost.backward[grid]) * weight).max(axis=1)
    # The limit of a stage: state + stored x in flight within the memory of each of its devices.
    flight = cost.in_flight(share[None])[0]
    need = (cost.state[None, None] + cost.stored[None, None] * flight[:, :, None]) / cost.memory[grid][:, :, None]
    # Plain numbers: these are thousands of short searches.
    times: list[list[float]] = time.tolist()
    needs: list[list[float]] = need.max(axis=1).tolist()

    def take(limit: float) -> list[int] | None:
        cuts = [0]
        for s, (row, held) in enumerate(zip(times, needs, strict=True)):
            at = cuts[-1]
            by_time = bisect_right(row, row[at] + limit * (1 + 1e-12)) - 1
            by_memory = bisect_right(held, held[at] + 1 + 1e-9) - 1
            end = min(by_time, by_memory, units - (stages - 1 - s))
            if end <= at:
                return None
            cuts.append(end)
        return cuts if cuts[-1] == units else None

    high = max(row[-1] for row in times)
    best = take(high)
    if best is None:
        return None
    low = 0.0
    for _ in range(50):
        middle = (low + high) / 2
        found = take(middle)
        if found is None:
            low = middle
        else:
            best, high = found, max(row[b] - row[a] for row, a, b in zip(times, found, found[1:], strict=False))
        if high - low < 1e-6 * high:
            break
    return np.array(best)


def starts(cost: Cost, lines: list[np.ndarray]) -> Layouts:
    """Every line with an even and an exact split, even and speed-proportional shares."""
    rows, cuts, shares = [], [], []
    units, stages, replicas = cost.units, cost.stages, cost.replicas
    even = even_cuts(units, stages)
    for line in lines:
        grid = line[: stages * replicas].reshape(stages, replicas)
        equal = even_share(cost.micro_batches, replicas)
        proportional = share_by_speed(cost, grid, even)
        for share in {tuple(equal.tolist()): equal, tuple(proportional.tolist()): proportional}.values():
            split = best_cuts(cost, grid, share)
            for cut in (even, split):
                if cut is not None:
                    rows.append(line)
                    cuts.append(cut)
                    shares.append(share)
    return Layouts(np.array(rows), np.array(cuts), np.array(shares))
