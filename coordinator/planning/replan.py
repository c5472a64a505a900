"""Planning again from new measurements, with hysteresis: a plan in use is left only for a stated gain."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from coordinator.planning.emit import gap, predicted, simulated_seconds
from coordinator.planning.joint.plan import bound_of, plan_joint
from coordinator.planning.stop import Stop
from coordinator.problem.objective import objective_figure, value
from coordinator.problem.problem import Problem
from facility.exchange.messages.plan import Plan


def replan(problem: Problem, stop: Stop, previous: Plan, *, seed: int = 0, least_gain: float = 0.05) -> Plan:
    """Plan again from new measurements, but move only for a gain of at least `least_gain` of the objective."""
    started = time.monotonic()
    known = _is_of(problem, previous)
    now = simulated_seconds(problem, previous) if known else np.inf
    fresh = plan_joint(problem, stop, seed=seed, extra=[previous] if known else [])
    assert fresh.predicted_seconds is not None
    if not np.isfinite(now):
        why = "the previous plan does not fit any more (devices, units, batch, memory or what is allowed have changed)"
        return replace(fresh, reasons=(why, *fresh.reasons))
    worth, least = value(problem, previous, now), value(problem, fresh, fresh.predicted_seconds)
    share = 1 - least / worth
    scale, unit = (3600, "device-hours") if problem.objective == "device_hours" else (1, "s")
    if share >= least_gain:
        why = (
            f"moved: {worth / scale:.4g} {unit} under the previous plan, {least / scale:.4g} {unit} now, "
            f"{share:.1%} less"
        )
        return replace(fresh, reasons=(why, *fresh.reasons))
    why = (
        f"kept: the best other plan would save {max(share, 0):.1%} of {worth / scale:.4g} {unit}, "
        f"less than the {least_gain:.0%} asked for"
    )
    bound = bound_of(problem, previous)
    cost, objective = objective_figure(problem, previous, now)
    return replace(
        previous,
        **predicted(problem, previous),
        cost=cost,
        objective=objective,
        lower_bound_seconds=min(bound.seconds, now),
        gap=gap(worth, min(bound.value, worth)),
        reasons=(why,),
        tried=fresh.tried,
        seconds_used=time.monotonic() - started,
    )


def _is_of(problem: Problem, plan: Plan) -> bool:
    """Whether the plan is one of these devices, units and batch, and of an allowed shape."""
    return (
        all(device < len(problem.devices) for row in plan.grid for device in row)
        and plan.device_ids in ((), tuple(device.id for device in problem.devices))
        and plan.units == len(problem.units)
        and sum(plan.replica_micro_batches) * plan.micro_batch_samples == problem.batch_samples
        and plan.micro_batch_samples in problem.micro_batch_samples
        and (not problem.stages or plan.stages in problem.stages)
        and (not problem.replicas or plan.replicas in problem.replicas)
    )
