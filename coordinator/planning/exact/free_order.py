"""Assigns layers to devices with the order of devices free: bound, heuristic, proof.

1. A lower bound aware of granularity: at a bottleneck value every device holds at most its best span anywhere.
2. An upper bound: order the devices greedily by least waste, with seeded restarts; each order is solved exactly
   (`contiguous`).
3. Where the two differ, the largest value below the upper bound is decided exactly, and the interval bisected:
   - few classes of equal devices: dynamic programme over how many of each class are used (only the furthest reach
     matters);
   - a periodic chain (such as a transformer): a small integer programme for a trail through the phases of the period
     (`periodic`, HiGHS). A general integer programme over (device, unit) pairs, as published with Sky Computing, has
     D x U binaries and does not improve on the even split within minutes; the phases need D x period^2.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from coordinator.planning.chain import TOLERANCE, Assignment, Chain, greedy, shortage
from coordinator.planning.exact.contiguous import Spans, best_in_order
from coordinator.planning.exact.periodic import Period, decide_periodic, find_period
from coordinator.problem.chain import ChainProblem

MAXIMUM_STATES = 3_000_000
Decision = list[int] | bool | None
"""An order that works, False: proven that none does, None: not known."""


def plan_exact(problem: ChainProblem, *, seconds: float = 30.0, seed: int = 0) -> Assignment:
    """The optimum over all orders of devices, with proof where it can be had in `seconds`; raises `Infeasible`."""
    started = time.monotonic()
    chain = Chain(problem)
    deadline = started + seconds
    rng = np.random.default_rng(seed)
    decide, method = _decider(chain, deadline)

    small = _states(chain) <= 5000  # the decisions are faster than a long search for a good start
    first = _heuristic(chain, rng, np.inf, deadline, restarts=2 if small else 20)
    if first is None:
        order = decide(np.inf)
        if isinstance(order, list):
            first = best_in_order(chain, order)
        if first is None:
            raise shortage(chain, None, lambda extra: _fits(problem, extra, deadline))
    spans, high = first
    low = max(granular_bound(chain), 0.0)
    better = None if small else _heuristic(chain, rng, high, deadline, restarts=60, low=low)
    if better is not None and better[1] < high:
        spans, high = better
    tried = [{"method": "least waste", "cost": high, "seconds": time.monotonic() - started}]
    proven = low >= high * (1 - 1e-9)
    probes = 0
    while not proven and time.monotonic() < deadline:
        # First ask for anything better at all: one refusal is the proof. Only after a success bisect.
        value = high * (1 - 1e-9) if probes == 0 or high - low < 1e-6 * high else (low + high) / 2
        answer = decide(value)
        probes += 1
        if answer is None:
            break
        if answer is False:
            low = max(low, value)
            proven = value >= high * (1 - 2e-9)
        else:
            assert isinstance(answer, list)
            found = best_in_order(chain, answer)
            assert found is not None and found[1] <= value * (1 + 1e-9), "the decided order does not hold its value"
            spans, high = found
    if proven:
        low = high
        how = "bound" if probes == 0 else method
        reason = f"optimal over all orders of devices, proven by {how} ({probes} decisions)"
    else:
        reason = f"not proven optimal within {seconds:g} s: gap {high / low - 1:.2%}" if low else "not proven optimal"
    tried.append({"method": method, "cost": high, "seconds": time.monotonic() - started})
    return Assignment(
        spans=tuple(spans), bottleneck=high, lower_bound=low, proven=proven, reasons=(reason,), tried=tuple(tried)
    )


def granular_bound(chain: Chain) -> float:
    """Below this value the best spans of all devices, taken anywhere, do not add up to the chain."""
    low, high = chain.fluid_bound, float(chain.time[:, -1].max())
    weights = [np.concatenate([[0.0], np.cumsum(chain.unit_seconds.mean(axis=0))]), chain.bytes]
    weights.append(np.arange(chain.units + 1, dtype=float))

    def enough(value: float) -> bool:
        totals = np.zeros(len(weights))
        for group in chain.classes:
            ends = chain.reach(group[0], value)
            totals += [len(group) * float((w[ends] - w).max()) for w in weights]
        return all(t >= w[-1] * (1 - 1e-9) for t, w in zip(totals, weights, strict=True))

    if enough(low):
        return low
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
        if high - low < 1e-12 * high:
            break
    return low


def _heuristic(
    chain: Chain, rng: np.random.Generator, ceiling: float, deadline: float, *, restarts: int, low: float = 0.0
) -> tuple[Spans, float] | None:
    """Orders built by least waste at shrinking bottleneck values; every order is then solved exactly."""
    best: tuple[Spans, float] | None = None
    groups = chain.classes
    natural = best_in_order(chain, list(range(chain.devices)))
    if natural is not None:
        best, ceiling = natural, min(ceiling, natural[1])
    if not np.isfinite(ceiling):
        ceiling = float(chain.time[:, -1].max())
    target, floor = ceiling * (1 - 1e-9), low
    for restart in range(restarts):
        if time.monotonic() > deadline or (best is not None and best[1] <= low * (1 + 1e-9)):
            break
        # Half of the restarts bisect towards the bound, the others ask for a little less than the best.
        value = (floor + target) / 2 if restart % 2 == 0 else target
        order = _least_waste(chain, groups, value, rng, noise=0.0 if restart < 2 else 0.1 * rng.random())
        if order is None:
            floor = value if restart % 2 == 0 else floor
            if floor >= target * (1 - 1e-6):
                floor = low
            continue
        found = best_in_order(chain, order)
        if found is not None and (best is None or found[1] < best[1]):
            best = found
            target = found[1] * (1 - 1e-9)
    return best


def _least_waste(
    chain: Chain, groups: list[list[int]], value: float, rng: np.random.Generator, noise: float
) -> list[int] | None:
    """At each position take the class of devices that leaves the smallest part of its possible work unused."""
    reach = [chain.reach(group[0], value) for group in groups]
    work = chain.time.mean(axis=0)
    best_span = np.array([float((work[ends] - work).max()) or 1.0 for ends in reach])
    stock = [list(group) for group in groups]
    order: list[int] = []
    position = 0
    while position < chain.units and any(stock):
        ends = np.array([r[position] for r in reach])
        waste = 1.0 - (work[ends] - work[position]) / best_span
        # A device is worth keeping in proportion to what it could do elsewhere: compare wasted work.
        score = waste * best_span + noise * best_span.mean() * rng.random(len(groups))
        score[[not s for s in stock]] = np.inf
        score[ends <= position] += 10 * best_span.max()
        done = [k for k in range(len(groups)) if stock[k] and ends[k] >= chain.units]
        chosen = done[0] if done else int(score.argmin())
        order.append(stock[chosen].pop())
        position = max(position, int(ends[chosen]))
    return order if position >= chain.units else None


def _states(chain: Chain) -> float:
    """Ways to have used some devices, equal ones alike."""
    return float(np.prod([float(len(group) + 1) for group in chain.classes]))


def _decider(chain: Chain, deadline: float) -> tuple[Callable[[float], Decision], str]:
    """The exact decision procedure that suits this chain."""
    states = _states(chain)
    period = find_period(chain)
    if states <= (50_000 if period else MAXIMUM_STATES):
        return lambda value: _decide_by_counts(chain, value), "dynamic programme over counts of equal devices"
    if period is not None:
        found: Period = period
        return lambda value: decide_periodic(chain, found, value, deadline), "integer programme over the period"
    return lambda value: None, "no exact method for so many unlike devices on a chain without period"


def _decide_by_counts(chain: Chain, value: float) -> Decision:
    """Furthest reach by number of devices used of each class; exact.

    F[n_1..n_K] = max over k of reach_k(F[.. n_k - 1 ..]): with equal devices interchangeable, nothing else matters.
    """
    groups = chain.classes
    shape = [len(group) + 1 for group in groups]
    strides = np.array([int(np.prod(shape[k + 1 :])) for k in range(len(shape))])
    reach = [chain.reach(group[0], value).astype(np.int32) for group in groups]
    count = np.indices(shape, dtype=np.int16).reshape(len(shape), -1)
    layer = count.sum(axis=0)
    by_layer = np.split(np.argsort(layer, kind="stable"), np.cumsum(np.bincount(layer))[:-1])
    furthest = np.zeros(count.shape[1], dtype=np.int32)
    for states in by_layer[1:]:
        best = np.zeros(len(states), dtype=np.int32)
        for k, ends in enumerate(reach):
            usable = count[k, states] > 0
            best[usable] = np.maximum(best[usable], ends[furthest[states[usable] - strides[k]]])
        furthest[states] = best
        if best.max() >= chain.units:
            break
    if furthest.max() < chain.units:
        return False
    state = int(furthest.argmax())
    order: list[int] = []
    stock = [list(group) for group in groups]
    while layer[state] > 0:
        for k, ends in enumerate(reach):
            if count[k, state] and ends[furthest[state - strides[k]]] == furthest[state]:
                order.append(stock[k].pop())
                state -= int(strides[k])
                break
    order.reverse()
    return order


def _fits(problem: ChainProblem, extra: float, deadline: float) -> bool:
    """True if `extra` bytes on every device would make a plan possible."""
    wider = Chain(problem)
    wider.limit = wider.limit + extra
    by_size = sorted(range(wider.devices), key=lambda d: wider.limit[d])
    if greedy(wider, by_size, np.inf) or greedy(wider, by_size[::-1], np.inf):
        return True
    decide, _ = _decider(wider, deadline)
    return bool(decide(np.inf))


__all__ = ["TOLERANCE", "granular_bound", "plan_exact"]
