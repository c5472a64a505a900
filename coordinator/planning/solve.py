"""From a problem and the name of a method to a plan: where the planners are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coordinator.planning.chain import Assignment
from coordinator.planning.dynamic import plan_dynamic
from coordinator.planning.emit import fastest, gap, plan_of_chain, plan_of_placement, plan_on
from coordinator.planning.even import plan_even
from coordinator.planning.exact.contiguous import plan_exact_in_order
from coordinator.planning.exact.free_order import plan_exact
from coordinator.planning.joint.bound import joint_bound
from coordinator.planning.joint.plan import plan_joint
from coordinator.planning.placement.place import plan_place
from coordinator.planning.replan import replan
from coordinator.planning.stop import Stop
from coordinator.problem.chain import ChainProblem, chain_of
from coordinator.problem.placement import PlacementProblem, placement_of
from coordinator.problem.problem import Problem
from coordinator.problem.read import AnyProblem
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.plan import Plan
from facility.exchange.schedules.registry import is_interleaved

METHODS = ("joint", "place", "exact", "dynamic", "even")
DEFAULT_SECONDS = 3.0


def solve(
    problem: AnyProblem,
    stop: Stop,
    *,
    method: str | None = None,
    seed: int = 0,
    order: str = "free",
    stages: int | None = None,
    replicas: int | None = None,
    previous: Plan | None = None,
    least_gain: float = 0.05,
) -> Plan:
    """Plan `problem` by `method` (default: `joint`; `place` or `exact` where the problem holds no more).

    Raises `ConfigurationError` for a method that the problem's form cannot serve, `Infeasible` where memory is short.
    """
    natural = {ChainProblem: "exact", PlacementProblem: "place"}.get(type(problem), "joint")
    chosen = natural if method is None else method
    if order != "free" and chosen != "exact":
        raise ConfigurationError(f"--order has no effect with --method {chosen}: leave it out, or give --method exact")
    if isinstance(problem, Problem):
        problem = _restricted(problem, stages, replicas)
    elif stages is not None or replicas is not None:
        raise ConfigurationError(
            "--stages and --replicas have no effect on a problem without devices, links and units: leave them out"
        )
    if previous is not None and not (isinstance(problem, Problem) and chosen == "joint"):
        raise ConfigurationError(f"a previous plan can be re-planned by joint only, found --method {chosen}")
    if chosen == "joint":
        if not isinstance(problem, Problem):
            raise ConfigurationError(
                f"--method joint needs devices, links and units in one problem; this one serves --method {natural}"
            )
        if previous is None:
            plan = plan_joint(problem, stop, seed=seed)
        else:
            plan = replan(problem, stop, previous, seed=seed, least_gain=least_gain)
    elif chosen == "place":
        plan = _place(problem, stop, seed)
    elif chosen in METHODS:
        plan = _chain(problem, chosen, stop, seed, order)
    else:
        raise ConfigurationError(f"--method is {chosen!r}, expected one of {', '.join(METHODS)}")
    return replace(plan, method=chosen, seed=seed, seconds_used=stop.used, interrupted=stop.interrupted)


def _restricted(problem: Problem, stages: int | None, replicas: int | None) -> Problem:
    change: dict[str, Any] = {}
    for name, value, allowed in (("stages", stages, problem.stages), ("replicas", replicas, problem.replicas)):
        if value is None:
            continue
        if allowed and value not in allowed:
            raise ConfigurationError(f"--{name} {value}: the problem allows {list(allowed)}")
        change[name] = (value,)
    return replace(problem, **change) if change else problem


def _chain(problem: AnyProblem, method: str, stop: Stop, seed: int, order: str) -> Plan:
    if isinstance(problem, PlacementProblem):
        raise ConfigurationError(f"--method {method} needs layers and speeds; this problem serves --method place")
    chain = chain_of(problem) if isinstance(problem, Problem) else problem
    methods: dict[str, Callable[[], Assignment]] = {
        "even": lambda: plan_even(chain),
        "dynamic": lambda: plan_dynamic(chain, sweeps=stop.iterations if stop.iterations is not None else 1000),
        "exact": lambda: (
            plan_exact_in_order(chain) if order == "given" else plan_exact(chain, seconds=stop.left, seed=seed)
        ),
    }
    found = methods[method]()
    plan = plan_of_chain(chain, found)
    if isinstance(problem, ChainProblem):
        return plan
    samples = min(problem.whole_sizes)
    return _fastest(
        problem,
        [
            plan_on(
                problem,
                plan.grid,
                [(a, b) for a, b in plan.stage_units],
                micro_batches=[problem.batch_samples // samples],
                micro_batch_samples=samples,
                schedule=schedule,
                sync=problem.syncs[0],
            )
            for schedule in _whole_schedules(problem)
        ],
        cost=plan.cost,
        objective="seconds of the busiest device for one micro-batch; network not looked at",
        reasons=plan.reasons,
        tried=plan.tried,
    )


def _whole_schedules(problem: Problem) -> list[str]:
    """The problem's schedules in which each device has one stage; 1F1B where it has none."""
    return [one for one in problem.schedules if not is_interleaved(one)] or ["1f1b"]


def _fastest(problem: Problem, plans: Sequence[Plan], **found: Any) -> Plan:
    """The plan that is predicted to be fastest, with its bound, its gap and what its method has `found`."""
    best = fastest(problem, plans)
    assert best.predicted_seconds is not None
    bound = min(joint_bound(problem).seconds, best.predicted_seconds)
    return replace(best, lower_bound_seconds=bound, gap=gap(best.predicted_seconds, bound), **found)


def _place(problem: AnyProblem, stop: Stop, seed: int) -> Plan:
    if isinstance(problem, ChainProblem):
        raise ConfigurationError("--method place needs delays and bandwidths; this problem serves --method exact")
    if isinstance(problem, PlacementProblem):
        return plan_of_placement(problem, plan_place(problem, stop, seed=seed))
    return placed(problem, *_degrees(problem), stop, seed=seed)


def _degrees(problem: Problem) -> tuple[int, int]:
    """The most nearly square grid of all devices among the allowed ones."""
    devices, units = len(problem.devices), len(problem.units)
    options = [
        (s, devices // s)
        for s in range(1, min(devices, units) + 1)
        if devices % s == 0
        and (not problem.stages or s in problem.stages)
        and (not problem.replicas or devices // s in problem.replicas)
        and devices // s <= problem.batch_samples // min(problem.whole_sizes)
    ]
    if not options:
        raise ConfigurationError(
            f"--method place uses every device: no allowed stages x replicas is {devices}; use --method joint"
        )
    return min(options, key=lambda o: (abs(o[0] - o[1]), o[0]))


def placed(problem: Problem, stages: int, replicas: int, stop: Stop, *, seed: int = 0, split: str = "even") -> Plan:
    """DT-FM's method: place equal stages by its cost; with `split` "best", then choose the layers for that grid."""
    from coordinator.planning.joint.cost import Cost
    from coordinator.planning.joint.starts import best_cuts, even_cuts, even_share

    network = placement_of(problem, stages, replicas)
    found = plan_place(network, stop, seed=seed)
    samples = min(problem.whole_sizes)
    plans = []
    for schedule in _whole_schedules(problem):
        cost = Cost(problem, stages, replicas, samples, schedule)
        share = even_share(cost.micro_batches, replicas)
        cuts = even_cuts(len(problem.units), stages)
        if split == "best":
            better = best_cuts(cost, np.array(found.grid), share)
            cuts = cuts if better is None else better
        plans += [
            plan_on(
                problem,
                found.grid,
                list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)),
                micro_batches=share.tolist(),
                micro_batch_samples=samples,
                schedule=schedule,
                sync=sync,
            )
            for sync in problem.syncs
        ]
    return _fastest(
        problem,
        plans,
        cost=found.cost,
        objective="DT-FM's communication cost (arXiv 2206.01288, section 3), seconds an iteration",
        reasons=(f"placed on the network alone ({found.start}); layers split {split}",),
        tried=tuple({"cost": c, "seconds": s, "proposals": p} for s, p, c in found.curve),
    )
