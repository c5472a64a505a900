"""Planning again from new measurements, with hysteresis: a plan in use is left only for a stated gain."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from coordinator.planning.emit import gap, predicted, simulated_seconds
from coordinator.planning.joint.plan import plan_joint
from coordinator.planning.stop import Stop
from coordinator.problem.problem import Problem
from facility.exchange.messages.plan import Plan


def replan(problem: Problem, stop: Stop, previous: Plan, *, seed: int = 0, least_gain: float = 0.05) -> Plan:
    """Plan again from new measurements, but move only for a gain of at least `least_gain` of the seconds.

    Raises `ConfigurationError` if the previous plan does not fit the problem's devices or units at all.
    """
    started = time.monotonic()
    fits = all(d < len(problem.devices) for row in previous.grid for d in row) and previous.units == len(problem.units)
    names = tuple(device.id for device in problem.devices)
    known = fits and (not previous.device_ids or previous.device_ids == names)
    now = simulated_seconds(problem, previous) if known else np.inf
    fresh = plan_joint(problem, stop, seed=seed, extra=[previous] if known else [])
    assert fresh.predicted_seconds is not None
    if not np.isfinite(now):
        why = "the previous plan does not fit any more (devices, units or memory have changed)"
        return replace(fresh, reasons=(why, *fresh.reasons))
    share = 1 - fresh.predicted_seconds / now
    if share >= least_gain:
        why = f"moved: {now:.4g} s under the previous plan, {fresh.predicted_seconds:.4g} s now, {share:.1%} less"
        return replace(fresh, reasons=(why, *fresh.reasons))
    fields = predicted(problem, previous)
    why = (
        f"kept: the best other plan would save {max(share, 0):.1%} of {now:.4g} s, "
        f"less than the {least_gain:.0%} asked for"
    )
    assert fresh.lower_bound_seconds is not None
    return replace(
        previous,
        **fields,
        cost=now,
        objective=fresh.objective,
        lower_bound_seconds=min(fresh.lower_bound_seconds, now),
        gap=gap(now, fresh.lower_bound_seconds),
        reasons=(why,),
        tried=fresh.tried,
        seconds_used=time.monotonic() - started,
    )
