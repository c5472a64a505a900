"""From what a planning method found to a `Plan`, which the trainer obeys, with seconds by part, loads and reasons.

Also what a finished plan is predicted and simulated to take, and the fastest of several.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coordinator.planning.chain import Assignment, Chain, Infeasible
from coordinator.planning.placement.place import Placement
from coordinator.problem.chain import ChainProblem
from coordinator.problem.placement import PlacementProblem
from coordinator.problem.problem import Problem
from coordinator.simulation.pipelines.iteration import memory_of
from coordinator.simulation.pipelines.plans import layout_of, simulate
from facility.exchange.messages.plan import DeviceLoad, Plan, Sync
from facility.exchange.sizes import format_bytes
from facility.exchange.text import number_of


def gap(value: float, bound: float) -> float | None:
    """value / bound - 1; None where the bound says nothing."""
    return max(0.0, value / bound - 1.0) if bound > 0 else None


def plan_of_chain(problem: ChainProblem, found: Assignment, **fields: Any) -> Plan:
    """One pipeline of the devices that hold something, in chain order; predicted: the busiest device."""
    chain = Chain(problem)
    value = chain.value(found.spans)
    held = {device: (first, end) for device, first, end in found.spans}
    loads = []
    for device in range(chain.devices):
        first, end = held.get(device, (0, 0))
        seconds = chain.seconds(device, first, end)
        limit = float(chain.limit[device])
        loads.append(
            DeviceLoad(
                device=device,
                seconds=seconds,
                slack_seconds=max(0.0, value - seconds),
                memory_bytes=chain.bytes_of(first, end),
                memory_limit_bytes=limit if np.isfinite(limit) else None,
            )
        )
    used = [device for device, _, _ in found.spans]
    idle = chain.devices - len(used)
    return Plan(
        stages=len(used),
        replicas=1,
        grid=tuple((device,) for device in used),
        stage_units=tuple((first, end) for _, first, end in found.spans),
        predicted_seconds=value,
        predicted_parts={"busiest device": value},
        lower_bound_seconds=found.lower_bound,
        gap=0.0 if found.proven else gap(value, found.lower_bound),
        cost=value,
        objective=f"time of the busiest device ({problem.time_unit}); network not looked at",
        reasons=(*found.reasons, *([f"{number_of(idle, 'device')} left empty: no use for more"] if idle else [])),
        tried=found.tried,
        loads=tuple(loads),
        device_ids=problem.device_ids,
        **fields,
    )


def plan_of_placement(problem: PlacementProblem, found: Placement, **fields: Any) -> Plan:
    """A grid of equal stages; a stage is one unit. Predicted: the published cost, seconds of traffic an iteration."""
    grid = found.grid
    return Plan(
        stages=problem.stages,
        replicas=problem.replicas,
        grid=grid,
        stage_units=tuple((n, n + 1) for n in range(problem.stages)),
        predicted_seconds=found.cost,
        predicted_parts=found.parts,
        lower_bound_seconds=found.lower_bound,
        gap=gap(found.cost, found.lower_bound),
        cost=found.cost,
        objective="DT-FM's communication cost (arXiv 2206.01288, section 3), seconds an iteration",
        schedule="gpipe",
        sync=Sync(name="sharded_ps"),
        reasons=(
            f"best of the starts and {number_of(found.rounds, 'round')} of annealing; it came from: {found.start}",
            "the emitted grid was costed again and agrees",
        ),
        tried=tuple({"cost": c, "seconds": s, "proposals": p} for s, p, c in found.curve),
        device_ids=problem.device_ids,
        **fields,
    )


def plan_on(
    problem: Problem,
    grid: Sequence[Sequence[int]],
    stage_units: Sequence[tuple[int, int]],
    *,
    micro_batches: Sequence[int],
    micro_batch_samples: int,
    schedule: str,
    sync: str,
    virtual_stages: int = 1,
) -> Plan:
    """A bare plan of a whole problem: the layout alone, nothing predicted."""
    return Plan(
        stages=len(grid),
        replicas=len(grid[0]),
        grid=tuple(tuple(int(d) for d in row) for row in grid),
        stage_units=tuple((int(a), int(b)) for a, b in stage_units),
        virtual_stages=virtual_stages,
        micro_batches=tuple(int(m) for m in micro_batches),
        micro_batch_samples=micro_batch_samples,
        schedule=schedule,
        sync=Sync(name=sync, options={"every": problem.local_steps} if problem.local_steps > 1 else {}),
        device_ids=tuple(device.id for device in problem.devices),
    )


def predicted(problem: Problem, plan: Plan) -> dict[str, Any]:
    """What the simulator says of a plan: total, parts and loads, as fields of `Plan`."""
    result = simulate(problem, plan, continued=True)
    total = result.iteration_seconds
    busiest = max(result.busy_seconds.values())
    parts = {
        "busiest device computing": busiest,
        "filling, draining and waiting for links": max(0.0, result.pipeline_seconds - busiest),
        "replicas agreeing, not hidden": result.sync_seconds,
        "optimizer": result.update_seconds,
    }
    memory = problem.memory
    loads = []
    for device in (d for row in plan.grid for d in row):
        limit = float(memory[device])
        loads.append(
            DeviceLoad(
                device=device,
                seconds=result.busy_seconds[device],
                slack_seconds=max(0.0, total - result.busy_seconds[device]),
                memory_bytes=result.memory_bytes[device],
                memory_limit_bytes=limit if np.isfinite(limit) else None,
            )
        )
    return {"predicted_seconds": total, "predicted_parts": parts, "loads": tuple(loads)}


def simulated_seconds(problem: Problem, plan: Plan) -> float:
    """Seconds of one iteration, by the simulator; infinite where the plan exceeds a memory."""
    limits, held = problem.memory, memory_of(layout_of(problem, plan), continued=True)
    if any(used > limits[device] * (1 + 1e-9) for device, used in held.items()):
        return float("inf")
    return simulate(problem, plan, continued=True).iteration_seconds


def fastest(problem: Problem, plans: Iterable[Plan]) -> Plan:
    """The fastest of the plans by simulation, its prediction filled in; raises `Infeasible` if none fits in memory."""
    best: Plan | None = None
    least, over = np.inf, ""
    for plan in plans:
        whole = replace(plan, **predicted(problem, plan))
        load = max(whole.loads, key=lambda one: one.memory_bytes / (one.memory_limit_bytes or np.inf))
        limit = load.memory_limit_bytes or np.inf
        if load.memory_bytes > limit * (1 + 1e-9):
            held, short = format_bytes(load.memory_bytes), format_bytes(load.memory_bytes - limit)
            name = problem.devices[load.device].id
            over = (
                f"under {plan.schedule} device {name!r} would hold {held} with its micro-batches in flight: short by "
                f"{short}"
            )
            continue
        assert whole.predicted_seconds is not None
        if whole.predicted_seconds < least:
            best, least = whole, whole.predicted_seconds
    if best is None:
        raise Infeasible(f"{over}; allow the schedule 1f1b or smaller micro-batches, or use --method joint")
    return best


__all__ = [
    "fastest",
    "gap",
    "layout_of",
    "plan_of_chain",
    "plan_of_placement",
    "plan_on",
    "predicted",
    "simulated_seconds",
]
