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


def decide(name: str, updates: RoundUpdates, parameters: Mapping[str, Value]) -> Plan:
    """The rule's plan for a round. Raises `InputError` when there are too few updates."""
    rule = RULES.get(name)
    if rule.minimum_updates:
        least = getattr(import_module(rule.module), rule.minimum_updates)(**parameters)
        if updates.count < least:
            numbers = ", ".join(f"{key} {value}" for key, value in parameters.items())
            raise InputError(
                f"{name}{f' with {numbers}' if numbers else ''} needs at least {least} updates, found {updates.count}"
            )
    return RULES.load(name)(updates, **parameters)
