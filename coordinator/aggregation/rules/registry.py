"""The aggregation rules by name."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from coordinator.aggregation.rules.contract import AggregationRule, Plan, RoundUpdates
from facility.exchange.checkpoints.floats import Array
from facility.exchange.errors import InputError
from facility.exchange.registry import Registry, Value

RULES = Registry(
    kind="aggregation rule",
    package="coordinator.aggregation.rules",
    entry_points="crossfed.aggregation_rules",
    declaration=AggregationRule,
)


def fewest_updates(name: str, parameters: Mapping[str, Value]) -> int:
    """Updates that the rule needs at least."""
    rule = RULES.get(name)
    if not rule.minimum_updates:
        return 1
    return int(getattr(import_module(rule.module), rule.minimum_updates)(**parameters))


def decide(name: str, updates: RoundUpdates, parameters: Mapping[str, Value]) -> Plan:
    """The rule's plan for a round, held to its contract: so are the functions in it, when they are called.

    Raises `InputError` when there are too few updates, or the rule decides nothing.
    """
    least = fewest_updates(name, parameters)
    if updates.count < least:
        numbers = ", ".join(f"{key} {value}" for key, value in parameters.items())
        raise InputError(
            f"{name}{f' with {numbers}' if numbers else ''} needs at least {least} updates, found {updates.count}"
        )
    plan = RULES.call(name, updates, **parameters)
    if not isinstance(plan, Plan) or (plan.coefficients is plan.tensor_coefficients is plan.combine is None):
        raise InputError(
            f"the rule {name} returned {plan!r:.200}, expected a Plan with coefficients, tensor_coefficients or combine"
        )
    return _held(name, plan, updates.count)


def _held(name: str, plan: Plan, count: int) -> Plan:
    """A plan of the rule `name` for `count` updates that raises `InputError` for what no plan may decide."""
    by_tensor, combine = plan.tensor_coefficients, plan.combine
    try:
        json.dumps(plan.details, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the rule {name} gives details that round.json cannot hold ({error}), expected a dict of texts, Python's "
            "finite numbers, lists and dicts"
        ) from None

    def for_tensor(tensor: str) -> list[float] | None:
        assert by_tensor is not None
        found = by_tensor(tensor)
        return None if found is None else _numbers(name, found, count, f" for tensor {tensor!r}")

    def combined(steps: Array, tensor: str, offset: int) -> Array:
        assert combine is not None
        found = combine(steps, tensor, offset)
        if isinstance(found, np.ndarray) and found.shape == steps.shape[1:] and found.dtype.kind == "f":
            return found
        what = f"an array of shape {found.shape} and dtype {found.dtype}" if isinstance(found, np.ndarray) else found
        raise InputError(
            f"the rule {name} combines steps of tensor {tensor!r} of shape {steps.shape} into {what!s:.200}; expected "
            f"a numpy array of {steps.shape[1]} floating-point values"
        )

    return dataclasses.replace(
        plan,
        coefficients=None if plan.coefficients is None else _numbers(name, plan.coefficients, count),
        tensor_coefficients=by_tensor and for_tensor,
        combine=combine and combined,
    )


def _numbers(name: str, found: Sequence[Any], count: int, where: str = "") -> list[float]:
    """Coefficients as floats. Raises `InputError` unless there is a finite one for each of `count` updates."""
    try:
        numbers = [float(one) for one in found]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise InputError(
            f"the rule {name} decides on the coefficients {found!s:.200}{where}, expected {count} finite numbers, one "
            "for each update"
        )
    return numbers
