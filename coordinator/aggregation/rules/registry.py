"""The aggregation rules by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from coordinator.aggregation.rules.contract import AggregationRule, Plan, RoundUpdates
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
    """The rule's plan for a round. Raises `InputError` when there are too few updates, or it decides nothing."""
    least = fewest_updates(name, parameters)
    if updates.count < least:
        numbers = ", ".join(f"{key} {value}" for key, value in parameters.items())
        raise InputError(
            f"{name}{f' with {numbers}' if numbers else ''} needs at least {least} updates, found {updates.count}"
        )
    plan = RULES.load(name)(updates, **parameters)
    if not isinstance(plan, Plan) or (plan.coefficients is plan.tensor_coefficients is plan.combine is None):
        raise InputError(
            f"the rule {name} returned {plan!r:.200}, expected a Plan with coefficients, tensor_coefficients or combine"
        )
    return plan
