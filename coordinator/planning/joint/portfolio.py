"""Portfolio of shapes (successive halving): all run briefly, the better ones longer, the best until time is up.

K. Jamieson, A. Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", 2016, arXiv
1502.07943, with times in place of equal budgets. A shape's `estimate` is the closed forms' cost of its best layout,
times the simulator's ratio to them when it last scored this shape: closed forms are optimistic for 1F1B, by up to a
fifth.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from coordinator.planning.emit import plan_on
from coordinator.planning.joint.cost import Layouts
from coordinator.planning.joint.incumbent import Best
from coordinator.planning.joint.search import anneal, descend
from coordinator.planning.joint.shapes import Shape, sorted_pool
from coordinator.planning.joint.starts import best_cuts, even_share
from coordinator.planning.stop import Stop
from coordinator.problem.problem import Problem


class Rung(NamedTuple):
    """One rung of successive halving: each of the shapes that are left is annealed once, best first."""

    shapes: int
    """Most shapes that are annealed."""
    steps: int
    """Annealing steps of each chain."""
    chains: int
    until: float
    """Share of the time after which only the best shape is annealed."""
    worst: float
    """Largest estimate of a shape that is kept, relative to the best."""


RUNGS = (
    Rung(shapes=10, steps=100, chains=32, until=0.2, worst=1.25),
    Rung(shapes=5, steps=300, chains=48, until=0.4, worst=1.1),
    Rung(shapes=3, steps=600, chains=64, until=0.6, worst=1.04),
)
ALL_SCORED = 16
"""Layouts that are simulated of a shape of which all were looked at: closed forms are a fifth off at most."""
CLOSE = 1.02
"""A second shape shares the remaining time while its estimate is within this of the best."""


def run_portfolio(problem: Problem, best: Best, shapes: list[Shape], rng: np.random.Generator, stop: Stop) -> int:
    """Score every promising start, then anneal; returns the rounds made."""
    for shape in leading(shapes, max(4, RUNGS[0].shapes)):
        if stop(0) and best.plan is not None:
            return 0
        whole = shape.whole and not problem.links.shared
        _score(problem, best, shape, ALL_SCORED if whole else 1, "one of all" if shape.whole else "structured start")
    rounds, field = 0, [shape for shape in shapes if not shape.whole]
    if not field:
        return 0
    begun = stop.used
    for rung in RUNGS:
        field = leading(field, rung.shapes, worst=rung.worst)
        for shape in field:
            if stop(rounds) and best.plan is not None:
                return rounds
            if stop.used > begun + rung.until * (stop.seconds - begun) and shape is not field[0]:
                break
            _round(problem, best, shape, rng, stop, steps=rung.steps, chains=rung.chains, hot=0.03)
            rounds += 1
    while not stop(rounds):
        field = leading(field, 2, worst=CLOSE)
        shape = field[1 if rounds % 3 == 2 and len(field) > 1 else 0]
        hot = 0.008 if rounds % 4 == 3 else 0.03
        _round(problem, best, shape, rng, stop, steps=1000, chains=64, hot=hot)
        rounds += 1
        if shape.cost.stages * shape.cost.replicas == 1:
            break
    return rounds


def leading(shapes: list[Shape], count: int, *, worst: float = np.inf) -> list[Shape]:
    """So many shapes of the best estimate, within `worst` of the first: the best that fits in memory, if any does.

    What has no layout within memory stays beside it, since the search may find one, but never in its place: the cost of
    an excess is a guess.
    """
    order = sorted(shapes, key=lambda s: s.estimate)
    first = next((shape for shape in order if shape.fits), order[0])
    close = [shape for shape in order if shape is not first and shape.estimate <= worst * first.estimate]
    return [first, *close][:count]


def _round(
    problem: Problem,
    best: Best,
    shape: Shape,
    rng: np.random.Generator,
    stop: Stop,
    *,
    steps: int,
    chains: int,
    hot: float,
) -> None:
    """One cooling of a shape: half of the chains from its pool, half from random devices; the best are simulated."""
    cost = shape.cost
    width = len(shape.pool.line)
    index = np.arange(chains // 2) % width
    begin = [shape.pool.take(index)]
    lines, cuts, shares = [], [], []
    used = cost.stages * cost.replicas
    equal = even_share(cost.micro_batches, cost.replicas)
    for _ in range(chains - len(index)):
        line = rng.permutation(len(problem.devices))
        cut = best_cuts(cost, line[:used].reshape(cost.stages, cost.replicas), equal)
        lines.append(line)
        cuts.append(shape.pool.cuts[0] if cut is None else cut)
        shares.append(equal)
    begin.append(Layouts(np.array(lines), np.array(cuts), np.array(shares)))
    found, _ = anneal(cost, Layouts.join(begin), rng, stop, steps=steps, hot=hot)
    parts = [shape.pool, found]
    if steps >= RUNGS[-1].steps:
        joined = Layouts.join(parts)
        best_first, _ = sorted_pool(cost, joined, cost.value(joined))
        parts.append(descend(cost, joined.take(best_first[:1]), stop))
    merged = Layouts.join(parts)
    worth = cost.value(merged)
    _, unique = np.unique(
        np.concatenate([merged.line[:, :used], merged.cuts, merged.share], axis=1), axis=0, return_index=True
    )
    order, shape.fits = sorted_pool(cost, merged.take(unique), worth[unique])
    order = unique[order]
    shape.pool, shape.worth = merged.take(order), worth[order]
    _score(problem, best, shape, 1 if problem.links.shared else 6, "annealed")


def _score(problem: Problem, best: Best, shape: Shape, count: int, how: str) -> None:
    """Simulate the best layouts of a shape under every allowed schedule and mode of agreement."""
    cost = shape.cost
    if shape.estimate > 1.5 * best.value:
        return
    for number in range(min(count, len(shape.worth))):
        grid = shape.pool.line[number, : cost.stages * cost.replicas].reshape(cost.stages, cost.replicas)
        cuts = shape.pool.cuts[number]
        least = np.inf
        for schedule in shape.schedules if number == 0 and how == "annealed" else (cost.schedule,):
            for sync in problem.syncs if cost.replicas > 1 else problem.syncs[:1]:
                if best.stop.left <= 0 and best.plan is not None:
                    return
                plan = plan_on(
                    problem,
                    grid.tolist(),
                    list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)),
                    micro_batches=shape.pool.share[number].tolist(),
                    micro_batch_samples=cost.samples,
                    schedule=schedule,
                    sync=sync,
                )
                name = f"{cost.stages} x {cost.replicas}, micro-batches of {cost.samples}, {schedule}"
                seconds = best.offer(plan, f"{name}, {sync}, {how}")
                least = min(least, seconds) if schedule == cost.schedule else least
        if number == 0 and np.isfinite(least):
            shape.bias = least / float(cost.seconds(shape.pool.take([0]))[0])
