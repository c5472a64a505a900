"""DT-FM's cost of a placement, and the exact bottleneck matching inside it.

Yuan et al. 2022, "Decentralized Training of Foundation Models in Heterogeneous Environments", arXiv 2206.01288,
section 3:

    DataP-cost    = max over stages, over devices d of the stage, of sum over d' of 2 (latency + c_dp / (R bandwidth))
    Pipeline-cost = min over stage orders of the sum, over consecutive stages, of the bottleneck of the best perfect
                    matching under latency + c_pp / bandwidth
    cost          = DataP-cost + 2 Pipeline-cost

Both factors 2 stand for two directions of traffic; on asymmetric links each direction is taken as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from coordinator.problem.placement import PlacementProblem


@dataclass(frozen=True)
class Costs:
    """[device, device] seconds, both directions: sharing a stage, and facing each other across a boundary."""

    data: np.ndarray
    pipeline: np.ndarray
    stages: int
    replicas: int


def costs_of(problem: PlacementProblem) -> Costs:
    """Both matrices of the published cost."""
    latency = np.array(problem.latency_seconds, dtype=float)
    bandwidth = np.array(problem.bandwidth_bytes_per_second, dtype=float)
    for array, value in ((latency, 0.0), (bandwidth, np.inf)):
        np.fill_diagonal(array, value)
    data = latency + problem.gradient_bytes / problem.replicas / bandwidth
    pipeline = latency + problem.activation_bytes / bandwidth
    return Costs(data + data.T, pipeline + pipeline.T, problem.stages, problem.replicas)


def grid_cost(costs: Costs, grid: np.ndarray) -> float:
    """The cost of `grid[stage, replica]` as it is emitted: nothing is matched or ordered any more."""
    data = max(float(costs.data[np.ix_(row, row)].sum(axis=1).max()) for row in grid)
    return data + sum(float(costs.pipeline[a, b].max()) for a, b in zip(grid, grid[1:], strict=False))


def bottleneck_matching(weights: np.ndarray) -> tuple[float, np.ndarray]:
    """The least possible largest weight of a perfect matching of rows to columns, and that matching.

    Starts at the largest of all row and column minima, a lower bound that is often attained, and bisects upwards over
    the weights; feasibility by Hopcroft-Karp (scipy). Returns the assignment found at the final threshold.
    """
    low = max(weights.min(axis=1).max(), weights.min(axis=0).max())
    values = np.unique(weights[weights >= low])
    best: np.ndarray | None = None
    first, last = 0, len(values) - 1
    probe = 0
    while first <= last:
        found = _perfect(weights <= values[probe])
        if found is not None:
            best, last = found, probe - 1
        else:
            first = probe + 1
        probe = (first + last) // 2
    assert best is not None
    return float(weights[np.arange(len(weights)), best].max()), best


def _perfect(allowed: np.ndarray) -> np.ndarray | None:
    """A perfect matching in a boolean matrix: column of every row, or None."""
    if not (allowed.any(axis=1).all() and allowed.any(axis=0).all()):
        return None
    match = maximum_bipartite_matching(csr_array(allowed.astype(np.int8)), perm_type="column")
    return None if (match < 0).any() else np.asarray(match)


class Matchings:
    """Bottleneck matchings between sets of devices, remembered."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def weight(self, left: Sequence[int], right: Sequence[int]) -> float:
        """Bottleneck between two stages, given as sorted tuples of devices."""
        key = (tuple(left), tuple(right))
        if key[0] > key[1]:
            key = (key[1], key[0])
        value = self.known.get(key)
        if value is None:
            if len(self.known) > 200_000:
                self.known.clear()
            value = self.known[key] = bottleneck_matching(self.costs.pipeline[np.ix_(*key)])[0]
        return value

    def cost(self, stages: Sequence[Sequence[int]]) -> float:
        """The published cost of stages in this order, columns matched at best."""
        data = max(float(self.costs.data[np.ix_(row, row)].sum(axis=1).max()) for row in stages)
        return data + sum(self.weight(a, b) for a, b in zip(stages, stages[1:], strict=False))

    def emit(self, stages: Sequence[Sequence[int]]) -> np.ndarray:
        """The grid: columns composed of the matchings along the order."""
        grid = [np.array(stages[0])]
        for row in stages[1:]:
            columns = np.array(row)
            _, match = bottleneck_matching(self.costs.pipeline[np.ix_(grid[-1], columns)])
            grid.append(columns[match])
        return np.stack(grid)


def best_order(weights: np.ndarray) -> tuple[float, list[int]]:
    """The cheapest open path through all nodes: Held-Karp for up to 13 of them, else nearest insertion and 2-opt."""
    count = len(weights)
    if count == 1:
        return 0.0, [0]
    if count > 13:
        return _two_opt(weights)
    best = np.full((1 << count, count), np.inf)
    before = np.full((1 << count, count), -1, dtype=np.int16)
    for node in range(count):
        best[1 << node, node] = 0.0
    for mask in range(1, 1 << count):
        inside = [n for n in range(count) if mask >> n & 1]
        if len(inside) < 2:
            continue
        for node in inside:
            row = best[mask ^ (1 << node)] + weights[:, node]
            previous = int(row.argmin())
            best[mask, node], before[mask, node] = row[previous], previous
    mask = (1 << count) - 1
    node = int(best[mask].argmin())
    value, path = float(best[mask, node]), []
    while node >= 0:
        path.append(node)
        mask, node = mask ^ (1 << node), int(before[mask, node])
    return value, path[::-1]


def _two_opt(weights: np.ndarray) -> tuple[float, list[int]]:
    def length(path: list[int]) -> float:
        return float(weights[path[:-1], path[1:]].sum())

    best_path: list[int] = []
    best_length = np.inf
    for start in range(len(weights)):
        path, left = [start], set(range(len(weights))) - {start}
        while left:
            path.append(min(left, key=lambda n: (weights[path[-1], n], n)))
            left.remove(path[-1])
        now, improved = length(path), True
        while improved:
            improved = False
            for i in range(len(path) - 1):
                for j in range(i + 1, len(path)):
                    other = path[:i] + path[i : j + 1][::-1] + path[j + 1 :]
                    if (value := length(other)) < now * (1 - 1e-12):
                        path, now, improved = other, value, True
        if now < best_length:
            best_path, best_length = path, now
    return best_length, best_path


def placement_bound(costs: Costs) -> float:
    """A lower bound on the published cost.

    Data part: every device must share its stage with R - 1 others, at best its R - 1 cheapest. Pipeline part: the links
    used form R disjoint paths, a forest; the boundary that is k-th cheapest has R links no cheaper than any of the
    boundaries before it, so at least kR forest edges lie at or below it, and it costs at least the (kR)-th edge of
    Kruskal's forest.
    """
    stages, replicas = costs.stages, costs.replicas
    data = 0.0
    if replicas > 1:
        off = costs.data + np.where(np.eye(len(costs.data), dtype=bool), np.inf, 0.0)
        data = float(np.sort(off, axis=1)[:, : replicas - 1].sum(axis=1).max())
    edges = spanning_tree(costs.pipeline)
    return data + sum(edges[k * replicas - 1] for k in range(1, stages))


def spanning_tree(weights: np.ndarray) -> list[float]:
    """Weights of the minimum spanning tree, ascending (Prim)."""
    count = len(weights)
    inside = np.zeros(count, dtype=bool)
    inside[0] = True
    nearest = weights[0].copy()
    chosen = []
    for _ in range(count - 1):
        node = int(np.where(inside, np.inf, nearest).argmin())
        chosen.append(float(nearest[node]))
        inside[node] = True
        nearest = np.minimum(nearest, weights[node])
    return sorted(chosen)
