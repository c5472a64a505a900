"""Places a grid on a heterogeneous network under DT-FM's cost: structured starts, then many annealing chains at once.

All chains advance together as numpy arrays (one proposal each per step): swap two devices of two stages, or two stages
of the order. Two measures avoid plateaus of the min-max objective:
- a boundary is scored by a concave surrogate, sqrt(bound x mean) over the row and column minima of its matching:
  `bound`, the largest of them, never exceeds the true bottleneck and usually equals it; `mean` distinguishes two states
  with the same bottleneck;
- the chains differ in temperature and in the weight of the mean.
The best states of every cooling are scored exactly (bottleneck matchings, Held-Karp order), and only exact costs
decide. Starts: devices ordered by hierarchical clustering, cut into stages or into pipelines, and random ones.

OR-Tools does not fit here: the objective is a sum of bottlenecks of matchings, which CP-SAT must unfold into
stages x replicas x devices booleans with weak min-max bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.cluster.hierarchy import fcluster, leaves_list, linkage
from scipy.spatial.distance import squareform

from coordinator.planning.placement.cost import Costs, Matchings, best_order, costs_of, grid_cost, placement_bound
from coordinator.planning.stop import Stop
from coordinator.problem.placement import PlacementProblem

Stages = list[tuple[int, ...]]
PATIENCE = 3
"""Rounds without a gain after which the search ends."""
STEPS = 2000
"""Proposals of a chain in one cooling."""
KEPT_STARTS = 7
"""Structured starts that are annealed."""
HOT = (0.002, 0.0007, 0.006)
"""First temperatures of the chains, as shares of their cost: refine a start, refine it gently, leave it."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A grid with its cost under the published objective."""

    grid: tuple[tuple[int, ...], ...]
    """[stage][replica] = device."""
    cost: float
    parts: dict[str, float]
    """Data and pipeline part of the cost."""
    lower_bound: float
    curve: tuple[tuple[float, int, float], ...]
    """(seconds, proposals, best cost so far)."""
    rounds: int
    start: str
    """Which start led to the best."""


class _Best:
    """The best exact state so far."""

    def __init__(self, costs: Costs, stop: Stop) -> None:
        self.costs, self.stop = costs, stop
        self.matchings = Matchings(costs)
        self.cost: float = np.inf
        self.stages: Stages = []
        self.start = ""
        self.curve: list[tuple[float, int, float]] = []
        self.seen: set[tuple[tuple[int, ...], ...]] = set()

    def offer(self, rows: np.ndarray, start: str, proposals: int, *, reorder: bool = True) -> float:
        """Score stages exactly, in their best order; keep them if they are the best."""
        stages = [tuple(sorted(row)) for row in rows.tolist()]
        key = tuple(sorted(stages))
        if key in self.seen:
            return np.inf
        self.seen.add(key)
        cost = self.matchings.cost(stages)
        if reorder and cost < 1.3 * self.cost:
            weights = np.array([[0.0 if a == b else self.matchings.weight(a, b) for b in stages] for a in stages])
            _, order = best_order(weights)
            stages = [stages[n] for n in order]
            cost = self.matchings.cost(stages)
        if cost < self.cost * (1 - 1e-12):
            self.cost, self.stages, self.start = cost, stages, start
            self.curve.append((self.stop.used, proposals, cost))
        return cost


def plan_place(problem: PlacementProblem, stop: Stop, *, seed: int = 0, chains: int = 24) -> Placement:
    """The best placement found until `stop` (counted in rounds of annealing); the emitted grid is re-costed."""
    costs = costs_of(problem)
    bound = placement_bound(costs)
    best = _Best(costs, stop)
    rng = np.random.default_rng(seed)
    starts = _structured(costs)
    scored = {name: best.offer(rows, name, 0) for name, rows in starts.items()}
    starts = {name: starts[name] for name in sorted(starts, key=lambda n: scored[n])[:KEPT_STARTS]}
    rounds = proposals = 0
    random = rng.permuted(np.tile(np.arange(costs.data.shape[0]), (1, 1)), axis=1).reshape(costs.stages, costs.replicas)
    best.offer(random, "random", 0)
    idle = 0
    while costs.stages > 1 and idle < PATIENCE and not stop(rounds) and best.cost > bound * (1 + 1e-9):
        before = best.cost
        names, states = _round_starts(costs, starts, best, rng, chains, rounds)
        proposals = _anneal(costs, names, states, best, rng, stop, proposals)
        if not stop(rounds):
            proposals = _descend(best, rng, stop, proposals)
        rounds += 1
        idle = 0 if best.cost < before * (1 - 1e-9) else idle + 1
    grid = best.matchings.emit(best.stages)
    emitted = grid_cost(costs, grid)
    assert abs(emitted - best.cost) <= 1e-9 * emitted, f"emitted grid costs {emitted}, reported {best.cost}"
    data = max(float(costs.data[np.ix_(row, row)].sum(axis=1).max()) for row in grid)
    return Placement(
        grid=tuple(map(tuple, grid.tolist())),
        cost=emitted,
        parts={"replicas agreeing": data, "boundaries": emitted - data},
        lower_bound=min(bound, emitted),
        curve=tuple(best.curve),
        rounds=rounds,
        start=best.start,
    )


def _structured(costs: Costs) -> dict[str, np.ndarray]:
    """Groups close devices: in one stage, in one pipeline, or in a piece of a pipeline (bands of some stages).

    The devices are ordered by clusters, the largest clusters first, at several levels of the clustering tree; a band of
    h stages takes the next h x R devices, h at a time as pieces of pipelines.
    """
    count = len(costs.data)
    numbers = np.arange(count)
    lines = {"numbered": numbers}
    if count > 2:
        # Equal distances: ties are broken by number, so that a numbering that is a good layout already stays whole.
        distance = costs.pipeline + 1e-12 * costs.pipeline.max() * np.abs(numbers[:, None] - numbers[None, :]) / count
        np.fill_diagonal(distance, 0.0)
        tree = linkage(squareform(distance, checks=False), "average")
        leaves = leaves_list(tree)
        heights = tree[:, 2]
        gaps = np.diff(np.log(heights))
        levels = [np.inf] + [
            float(np.sqrt(heights[n] * heights[n + 1])) for n in np.argsort(-gaps)[:3] if gaps[n] > 1e-3
        ]
        for level in levels:
            label = np.ones(count, dtype=int) if level == np.inf else fcluster(tree, level, "distance")
            size = np.bincount(label)
            position = np.empty(count, dtype=int)
            position[leaves] = numbers
            first = np.full(size.shape, count)
            np.minimum.at(first, label, position)
            lines[f"clusters under {level:.3g} s"] = np.lexsort((position, first[label], -size[label]))
    found = {}
    for name, line in lines.items():
        for height in range(1, costs.stages + 1):
            if costs.stages % height == 0:
                pieces = line.reshape(costs.stages // height, costs.replicas, height)
                found[f"{name}, bands of {height}"] = pieces.transpose(0, 2, 1).reshape(costs.stages, costs.replicas)
    return found


def _round_starts(
    costs: Costs, starts: dict[str, np.ndarray], best: _Best, rng: np.random.Generator, chains: int, number: int
) -> tuple[list[str], np.ndarray]:
    """Most structured, cheapest starts first; a third from the best so far after the first round, a sixth random."""
    names: list[str] = []
    states = np.empty((chains, costs.stages, costs.replicas), dtype=np.int64)
    pool = list(starts.items())
    for chain in range(chains):
        if number and chain % 3 == 0:
            names.append(f"{best.start}, again" if not best.start.endswith("again") else best.start)
            states[chain] = np.array(best.stages)
        elif pool and chain % 6 != 5:
            name, rows = pool[chain % len(pool)]
            names.append(name)
            states[chain] = rows
        else:
            names.append("random")
            states[chain] = rng.permutation(costs.stages * costs.replicas).reshape(costs.stages, costs.replicas)
    return names, states


class _State:
    """Surrogate energies of all chains, kept up to date move by move."""

    def __init__(self, costs: Costs, states: np.ndarray, mix: np.ndarray) -> None:
        self.costs, self.x, self.mix = costs, states, mix
        self.data = self.data_sums(states)
        self.edges = self.boundary(states[:, :-1], states[:, 1:])

    def data_sums(self, rows: np.ndarray) -> np.ndarray:
        """[..., device] what every device of a stage pays for agreeing with the others."""
        return self.costs.data[rows[..., :, None], rows[..., None, :]].sum(axis=-1)

    def boundary(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Concave surrogate of bottlenecks between stages `left` and `right` of shape [chain, any, replica]."""
        weights = self.costs.pipeline[left[..., :, None], right[..., None, :]]
        rows, columns = weights.min(axis=-1), weights.min(axis=-2)
        bound = np.maximum(rows.max(axis=-1), columns.max(axis=-1))
        mean = (rows.mean(axis=-1) + columns.mean(axis=-1)) / 2
        mix = self.mix[:, None]
        return bound ** (1 - mix) * mean**mix

    def energy(self, data: np.ndarray, edges: np.ndarray) -> np.ndarray:
        """DataP (largest, with a little of the mean) plus the boundaries."""
        worst = data.max(axis=2)
        return worst.max(axis=1) * 0.97 + 0.03 * worst.mean(axis=1) + edges.sum(axis=1)


def _anneal(
    costs: Costs,
    names: list[str],
    states: np.ndarray,
    best: _Best,
    rng: np.random.Generator,
    stop: Stop,
    proposals: int,
) -> int:
    """One cooling of all chains; returns the number of proposals made in all."""
    chains, stages, replicas = states.shape
    k = np.arange(chains)
    mix = np.choose(k % 4, [0.5, 0.5, 0.3, 0.15]).astype(float)
    state = _State(costs, states, mix)
    energy = state.energy(state.data, state.edges)
    hot = energy * np.choose((k // 4) % 3, HOT)
    low, kept = energy.copy(), state.x.copy()
    for step in range(STEPS):
        if step % 50 == 49 and stop(0):
            break
        temperature = hot * (0.002 ** (step / STEPS))
        if step % 12 == 11:
            x, data, edges = _swap_stages(state, rng)
        else:
            x, data, edges = _swap_devices(state, rng)
        proposals += chains
        new = state.energy(data, edges)
        accept = (new <= energy) | (rng.random(chains) < np.exp(-np.maximum(new - energy, 0) / temperature))
        state.x[accept], state.data[accept], state.edges[accept] = x[accept], data[accept], edges[accept]
        energy[accept] = new[accept]
        better = energy < low * (1 - 1e-12)
        low[better], kept[better] = energy[better], state.x[better]
    few = chains if stages * replicas <= 24 else chains // 3
    for number, chain in enumerate(np.argsort(low)[:few]):
        if number > 3 and stop(0):
            break
        best.offer(kept[chain], names[chain], proposals)
    return proposals


def _swap_devices(state: _State, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every chain exchanges two devices of two stages; only their stages and boundaries are computed again."""
    chains, stages, replicas = state.x.shape
    k = np.arange(chains)
    a = rng.integers(stages, size=chains)
    b = (a + 1 + rng.integers(stages - 1, size=chains)) % stages
    i, j = rng.integers(replicas, size=(2, chains))
    x, data, edges = state.x.copy(), state.data.copy(), state.edges.copy()
    x[k, a, i], x[k, b, j] = state.x[k, b, j], state.x[k, a, i]
    both = np.stack([a, b], axis=1)
    data[k[:, None], both] = state.data_sums(x[k[:, None], both])
    # The boundary before and after each of the two stages; beyond the ends any boundary will do.
    touched = np.clip(np.stack([a - 1, a, b - 1, b], axis=1), 0, stages - 2)
    edges[k[:, None], touched] = state.boundary(x[k[:, None], touched], x[k[:, None], touched + 1])
    return x, data, edges


def _swap_stages(state: _State, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every chain reverses a part of its order of stages."""
    chains, stages, _ = state.x.shape
    first = rng.integers(stages, size=chains)
    last = rng.integers(stages, size=chains)
    low, high = np.minimum(first, last)[:, None], np.maximum(first, last)[:, None]
    place = np.arange(stages)[None, :]
    order = np.where((place >= low) & (place <= high), low + high - place, place)
    k = np.arange(chains)[:, None]
    x = state.x[k, order]
    return x, state.data[k, order], state.boundary(x[:, :-1], x[:, 1:])


def _descend(best: _Best, rng: np.random.Generator, stop: Stop, proposals: int) -> int:
    """Exact swaps around the best: only devices on the critical stage or boundaries can help."""
    costs = best.costs
    improved = True
    while improved and not stop(0):
        improved = False
        rows = np.array(best.stages)
        part = np.array([costs.data[np.ix_(r, r)].sum(axis=1).max() for r in rows])
        pairs = [(a, b) for a in range(costs.stages) for b in range(costs.stages) if a < b]
        worst = int(part.argmax())
        pairs.sort(key=lambda p: worst not in p)
        before = best.cost
        for a, b in pairs:
            for i in rng.permutation(costs.replicas):
                for j in rng.permutation(costs.replicas):
                    trial = rows.copy()
                    trial[a, i], trial[b, j] = rows[b, j], rows[a, i]
                    data = max(
                        float(costs.data[np.ix_(r, r)].sum(axis=1).max()) if n in (a, b) else part[n]
                        for n, r in enumerate(trial)
                    )
                    proposals += 1
                    if data >= before:
                        continue
                    if best.offer(trial, best.start, proposals, reorder=False) < before * (1 - 1e-12):
                        improved = True
                        break
                if improved or stop(0):
                    break
            if improved or stop(0):
                break
        if proposals > 10_000_000:
            break
    return proposals
