"""Annealing of whole layouts: devices, cuts, order of stages, columns and shares move together; many chains at once."""

from __future__ import annotations

import numpy as np

from coordinator.planning.joint.cost import Cost, Layouts
from coordinator.planning.stop import Stop

MOST_MOVES = 40
"""Steps of one descent."""


def anneal(
    cost: Cost, begin: Layouts, rng: np.random.Generator, stop: Stop, *, steps: int, hot: float
) -> tuple[Layouts, np.ndarray]:
    """Cool all chains once; the best state of every chain, within memory, if it came to one, and its cost."""
    state = begin.copy()
    chains = len(state.line)
    k = np.arange(chains)
    smooth = np.choose(k % 3, [0.02, 0.1, 0.25]).astype(float)
    energy = cost.value(state, smooth)
    temperatures = energy * np.choose((k // 3) % 3, [hot, hot / 4, hot * 2.5])
    best, low = state.copy(), energy.copy()
    limited = bool(np.isfinite(cost.memory).any())
    fits = fitting = cost.feasible(state)
    moves = [_swap_devices, _swap_devices, _swap_devices]
    if cost.stages > 1:
        moves += [_shift_units, _shift_units, _reverse_stages]
        if cost.replicas > 1:
            moves += [_exchange_tails]
    if cost.replicas > 1:
        moves += [_shift_share]
    for step in range(steps):
        if step % 25 == 24 and stop(0):
            break
        temperature = temperatures * (0.003 ** (step / steps))
        proposal = moves[step % len(moves)](cost, state, rng)
        new = cost.value(proposal, smooth)
        accept = (new <= energy) | (rng.random(chains) < np.exp(-np.maximum(new - energy, 0) / temperature))
        state.put(accept, proposal)
        energy[accept] = new[accept]
        better = energy < low * (1 - 1e-12)
        if limited:
            fits = np.where(accept, cost.feasible(proposal), fits)
            better = (better & (fits == fitting)) | (fits & ~fitting)
            fitting = fitting | (fits & better)
        best.put(better, state)
        low[better] = energy[better]
    return best, cost.value(best)


def _swap_devices(cost: Cost, state: Layouts, rng: np.random.Generator) -> Layouts:
    """A device of the grid changes places with any other, idle ones included."""
    chains, count = state.line.shape
    k = np.arange(chains)
    a = rng.integers(cost.stages * cost.replicas, size=chains)
    b = rng.integers(count, size=chains)
    line = state.line.copy()
    line[k, a], line[k, b] = state.line[k, b], state.line[k, a]
    return Layouts(line, state.cuts, state.share)


def _shift_units(cost: Cost, state: Layouts, rng: np.random.Generator) -> Layouts:
    """One stage gives a unit to another; the stages between shift by one."""
    chains, stages = len(state.line), cost.stages
    i, j = np.sort(rng.integers(1, stages, size=(2, chains)), axis=0)
    sign = rng.choice([-1, 1], size=chains)
    place = np.arange(stages + 1)[None, :]
    cuts = state.cuts + sign[:, None] * ((place >= i[:, None]) & (place <= j[:, None]))
    bad = (np.diff(cuts, axis=1) < 1).any(axis=1)
    cuts[bad] = state.cuts[bad]
    return Layouts(state.line, cuts, state.share)


def _reverse_stages(cost: Cost, state: Layouts, rng: np.random.Generator) -> Layouts:
    """Part of the order of stages is reversed; every stage keeps its devices and its number of units."""
    chains, stages, replicas = len(state.line), cost.stages, cost.replicas
    low, high = np.sort(rng.integers(stages, size=(2, chains)), axis=0)
    near = rng.random(chains) < 0.5
    high = np.where(near, np.minimum(low + 1, stages - 1), high)
    place = np.arange(stages)[None, :]
    inside = (place >= low[:, None]) & (place <= high[:, None])
    order = np.where(inside, (low + high)[:, None] - place, place)
    k = np.arange(chains)[:, None]
    used = stages * replicas
    line = state.line.copy()
    line[:, :used] = state.line[:, :used].reshape(chains, stages, replicas)[k, order].reshape(chains, used)
    sizes = np.diff(state.cuts, axis=1)[k, order]
    cuts = np.concatenate([np.zeros((chains, 1), dtype=int), np.cumsum(sizes, axis=1)], axis=1)
    return Layouts(line, cuts, state.share)


def _exchange_tails(cost: Cost, state: Layouts, rng: np.random.Generator) -> Layouts:
    """Two replicas exchange their devices from some stage on: stages stay as they are, pipelines are joined anew."""
    chains, stages, replicas = len(state.line), cost.stages, cost.replicas
    k = np.arange(chains)
    a = rng.integers(replicas, size=chains)
    b = (a + 1 + rng.integers(replicas - 1, size=chains)) % replicas
    start = rng.integers(stages, size=chains)
    stop = np.where(rng.random(chains) < 0.5, start + 1, stages)
    line = state.line.copy()
    grid = line[:, : stages * replicas].reshape(chains, stages, replicas).copy()
    place = np.arange(stages)[None, :]
    tail = (place >= start[:, None]) & (place < stop[:, None])
    left, right = grid[k, :, a], grid[k, :, b]
    grid[k, :, a], grid[k, :, b] = np.where(tail, right, left), np.where(tail, left, right)
    line[:, : stages * replicas] = grid.reshape(chains, -1)
    return Layouts(line, state.cuts, state.share)


def _shift_share(cost: Cost, state: Layouts, rng: np.random.Generator) -> Layouts:
    """A replica gives a micro-batch to another."""
    chains, replicas = len(state.line), cost.replicas
    k = np.arange(chains)
    a = rng.integers(replicas, size=chains)
    b = (a + 1 + rng.integers(replicas - 1, size=chains)) % replicas
    number = np.minimum(rng.choice([1, 1, 2, 4], size=chains), state.share[k, a] - 1)
    share = state.share.copy()
    share[k, a] -= number
    share[k, b] += number
    return Layouts(state.line, state.cuts, share)


def descend(cost: Cost, begin: Layouts, stop: Stop) -> Layouts:
    """Local optimum from one layout: steepest descent over swaps of devices and shifts of a unit or micro-batches.

    From within memory it stays there.
    """
    now, worth, fits = begin, float(cost.value(begin)[0]), bool(cost.feasible(begin)[0])
    for _ in range(MOST_MOVES):
        if stop(0):
            break
        around = _neighbours(cost, now)
        values = cost.value(around)
        if not len(values):  # one device that holds everything has no neighbour
            break
        if fits:
            values = np.where(cost.feasible(around), values, np.inf)
        best = int(values.argmin())
        if values[best] >= worth * (1 - 1e-9):
            break
        now, worth = around.take([best]), float(values[best])
    return now


def _neighbours(cost: Cost, one: Layouts) -> Layouts:
    """All layouts one exchange or one shift away."""
    used, count = cost.stages * cost.replicas, one.line.shape[1]
    a, b = np.triu_indices(count, 1)
    a, b = a[a < used], b[a < used]
    lines = np.repeat(one.line, len(a), axis=0)
    k = np.arange(len(a))
    lines[k, a], lines[k, b] = one.line[0, b], one.line[0, a]
    found = [Layouts(lines, np.repeat(one.cuts, len(a), axis=0), np.repeat(one.share, len(a), axis=0))]
    first, last = (index + 1 for index in np.triu_indices(cost.stages - 1))
    for sign in (-1, 1):
        place = np.arange(cost.stages + 1)[None, :]
        cuts = one.cuts + sign * ((place >= first[:, None]) & (place <= last[:, None]))
        cuts = cuts[(np.diff(cuts, axis=1) >= 1).all(axis=1)]
        found.append(Layouts(np.repeat(one.line, len(cuts), 0), cuts, np.repeat(one.share, len(cuts), 0)))
    giver, taker = np.nonzero(~np.eye(cost.replicas, dtype=bool))
    for number in (1, 2, 4):
        share = np.repeat(one.share, len(giver), axis=0)
        share[np.arange(len(giver)), giver] -= number
        share[np.arange(len(giver)), taker] += number
        share = share[(share >= 1).all(axis=1)]
        found.append(Layouts(np.repeat(one.line, len(share), 0), np.repeat(one.cuts, len(share), 0), share))
    return Layouts.join(found)
