"""Joint search over grid, layers, stages, replicas, micro-batches, shares, schedule, synchronisation and compression.

1. All allowed shapes (stages x replicas, micro-batch size, schedule) get structured layouts (`starts`), costed in one
   batch.
2. The shapes compete in a portfolio (`portfolio`): the promising ones are annealed (`search`), the best of them get the
   remaining time.
3. The best states of every round are scored by the simulator, which alone decides. It also selects the mode of gradient
   synchronisation, interleaving (several chunks per device, `finish`), and, where devices stall, whether replicas wait
   for each other (`policy`).

The even split and the exact split of one pipeline are candidates as well, so a plan is never slower than those.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from coordinator.planning.chain import Infeasible
from coordinator.planning.emit import gap, plan_on, predicted
from coordinator.planning.even import even_spans
from coordinator.planning.exact.free_order import plan_exact
from coordinator.planning.joint.bound import Bound, joint_bound
from coordinator.planning.joint.cost import Cost, Layouts
from coordinator.planning.joint.finish import interleave
from coordinator.planning.joint.incumbent import Best
from coordinator.planning.joint.policy import policy_of
from coordinator.planning.joint.portfolio import run_portfolio
from coordinator.planning.joint.shapes import shapes_of
from coordinator.planning.stop import Stop
from coordinator.problem.chain import chain_of
from coordinator.problem.objective import objective_figure
from coordinator.problem.problem import Problem
from facility.exchange.messages.plan import Plan
from facility.exchange.schedules.registry import is_interleaved
from facility.exchange.scheduling.policies import POLICIES
from facility.exchange.text import number_of


def plan_joint(problem: Problem, stop: Stop, *, seed: int = 0, extra: Iterable[Plan] = ()) -> Plan:
    """The best plan found until `stop` (iterations: annealing rounds); `extra` plans compete. Raises `Infeasible`."""
    rng = np.random.default_rng(seed)
    best = Best(problem, stop)
    for plan in extra:
        best.offer(plan, "given plan")
    shapes = shapes_of(problem, stop)
    rounds = run_portfolio(problem, best, shapes, rng, stop)
    for plan, name in one_pipeline(problem, seconds=min(1.0, max(0.1, stop.left))):
        if best.plan is None or _may_win(problem, plan, best):
            best.offer(plan, name)
    if best.plan is None:
        raise _nothing_fits(problem)
    interleave(problem, best, stop)
    assert best.plan is not None
    found, why = policy_of(problem, best.plan)
    fields = predicted(problem, found)
    bound = bound_of(problem, found)
    cost, objective = objective_figure(problem, found, best.seconds)
    return replace(
        found,
        **fields,
        lower_bound_seconds=min(bound.seconds, fields["predicted_seconds"]),
        gap=gap(best.value, min(bound.value, best.value)),
        cost=cost,
        objective=objective,
        reasons=(
            *_reasons(problem, best, found, rounds),
            *([why] if why else []),
            f"the lower bound comes from {bound.reason}",
        ),
        tried=tuple(sorted(best.tried.values(), key=lambda t: t["seconds"])[:24]),
    )


def bound_of(problem: Problem, plan: Plan) -> Bound:
    """The bound on plans like this one: without lockstep nothing is agreed on within an iteration."""
    if POLICIES.get(plan.sync.name).synchronous:
        return joint_bound(problem)
    return joint_bound(replace(problem, units=tuple(replace(unit, parameter_bytes=0.0) for unit in problem.units)))


def _may_win(problem: Problem, plan: Plan, best: Best) -> bool:
    """True if a plan of one pipeline is worth simulating.

    Closed forms are within a fifth; long pipelines take a second to simulate.
    """
    if plan.stages * max(plan.replica_micro_batches) <= 2_000:
        return True
    cost = Cost(problem, plan.stages, 1, plan.micro_batch_samples, plan.schedule)
    used = [row[0] for row in plan.grid]
    rest = [device for device in range(len(problem.devices)) if device not in used]
    cuts = [0, *(end for _, end in plan.stage_units)]
    layout = Layouts(np.array([used + rest]), np.array([cuts]), np.array([plan.replica_micro_batches]))
    return float(cost.value(layout)[0]) < 1.25 * best.value


def one_pipeline(problem: Problem, *, seconds: float = 1.0) -> list[tuple[Plan, str]]:
    """The even and the exact split over one pipeline of all devices, for every schedule without interleaving.

    `seconds`: to prove the exact one in, at most.
    """
    found: list[tuple[Plan, str]] = []
    samples = min(problem.whole_sizes)
    units, devices = len(problem.units), len(problem.devices)
    if problem.replicas and 1 not in problem.replicas:
        return found
    layouts: dict[str, list[tuple[int, int, int]]] = {"even": even_spans(units, devices)}
    try:
        layouts["exact"] = list(plan_exact(chain_of(problem), seconds=seconds).spans)
    except Infeasible:
        pass
    for name, spans in layouts.items():
        if problem.stages and len(spans) not in problem.stages:
            continue
        for schedule in [s for s in problem.schedules if not is_interleaved(s)] or ["1f1b"]:
            plan = plan_on(
                problem,
                [(device,) for device, _, _ in spans],
                [(first, end) for _, first, end in spans],
                micro_batches=[problem.batch_samples // samples],
                micro_batch_samples=samples,
                schedule=schedule,
                sync=problem.syncs[0],
            )
            found.append((plan, f"{name}, one pipeline, {schedule}"))
    return found


def _reasons(problem: Problem, best: Best, plan: Plan, rounds: int) -> tuple[str, ...]:
    used = plan.world_size
    reasons = [
        f"{plan.extent} under {plan.schedule} "
        f"took {best.seconds:.4g} s in simulation, the least of {len(best.seen)} simulated plans; "
        f"found as: {best.origin} ({number_of(rounds, 'round')})"
    ]
    others = sorted((t for t in best.tried.values() if t["what"] != best.origin), key=lambda t: t["seconds"])
    shape = f"{plan.stages} x {plan.replicas},"
    other = next((t for t in others if not t["what"].startswith(shape)), None)
    if other is not None:
        share = f" ({other['seconds'] / best.seconds - 1:+.1%})" if best.seconds else ""
        reasons.append(f"next shape: {other['what']} at {other['seconds']:.4g} s{share}")
    even = min((t["seconds"] for t in others if t["what"].startswith("even")), default=None)
    if even is not None:
        share = f" ({even / best.seconds:.2f}x)" if best.seconds else ""
        reasons.append(f"the even split over one pipeline takes {even:.4g} s{share}")
    if plan.stages > 1 and plan.schedule not in problem.schedules:
        reasons.append(
            f"schedules holds {', '.join(problem.schedules)} alone, which needs several chunks a device and as many "
            f"micro-batches in every round of them; no such plan was possible or faster than {plan.schedule}"
        )
    idle = len(problem.devices) - used
    if idle:
        reasons.append(f"{number_of(idle, 'device')} left idle: no layout tried was better with more")
    counts = plan.replica_micro_batches
    if len(set(counts)) > 1:
        reasons.append(f"replicas take {min(counts)} to {max(counts)} micro-batches, by their speed")
    return tuple(reasons)


def _nothing_fits(problem: Problem) -> Infeasible:
    """Which memory is short when no shape fits."""
    try:
        plan_exact(chain_of(problem), seconds=2.0)
    except Infeasible as error:
        return error
    return Infeasible(
        "no allowed shape keeps within the memory of the devices, though the model itself fits once; "
        "allow fewer replicas, "
        "more stages, smaller micro-batches or the schedule 1f1b"
    )
