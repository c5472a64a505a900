"""What a plan is to be least in: seconds an iteration, device-hours, or, the other way round, tokens a second.

The batch of an iteration is given, so tokens a second are most exactly where seconds are least; device-hours are not: a
device that would shorten the iteration by less than its share stays idle.
"""

from __future__ import annotations

import numpy as np

from coordinator.problem.problem import Problem
from facility.exchange.messages.plan import Plan


def price_of(problem: Problem, plan: Plan) -> float:
    """Device-hours an hour of the plan counts as: the prices of the devices it uses."""
    return float(sum(problem.devices[device].price for row in plan.grid for device in row))


def value(problem: Problem, plan: Plan, seconds: float) -> float:
    """What the search makes least, for a plan that takes `seconds` an iteration."""
    return seconds * (price_of(problem, plan) if problem.objective == "device_hours" else 1.0)


def weights(problem: Problem) -> np.ndarray:
    """[device] what each used device adds to the factor of the seconds; all zero where only seconds count."""
    if problem.objective != "device_hours":
        return np.zeros(len(problem.devices))
    return np.array([device.price for device in problem.devices])


def objective_figure(problem: Problem, plan: Plan, seconds: float) -> tuple[float, str]:
    """The objective's own figure and what it is, as a plan states them."""
    if problem.objective == "tokens_per_second":
        return problem.batch_samples * problem.sample_tokens / seconds, "tokens a second (more is better), simulated"
    if problem.objective == "device_hours":
        return value(problem, plan, seconds) / 3600, "device-hours of one iteration, simulated"
    return seconds, "simulated seconds of one iteration"
