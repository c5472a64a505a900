"""The server learning rate over the rounds of a federation: constant, then linearly down over its last ones.

What a decay of the outer learning rate does at the end of training: "Covenant-72B", 2026, arXiv 2603.08163, which
lowered it from 1 to 0.65. A pure function of the round's number: a resumed run continues with the same rate.
"""

from __future__ import annotations

import dataclasses

from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS
from coordinator.aggregation.settings import AggregationSettings

RATE = "server_learning_rate"


def decay_factor(number: int, rounds: int, *, share: float, to: float) -> float:
    """What multiplies the server learning rate in round `number` of `rounds`, counted from 0.

    1 until the last `share` of the rounds, then linearly towards `to`, which the last round has.
    """
    decaying = round(share * rounds)
    left = rounds - 1 - number
    if decaying == 0 or left >= decaying:
        return 1.0
    return to + (1.0 - to) * max(left, 0) / decaying


def with_rate(settings: AggregationSettings, factor: float) -> AggregationSettings:
    """The settings with the server learning rate times `factor`; a user's own optimizer has no such rate."""
    entry = SERVER_OPTIMIZERS.get(settings.server_optimizer)
    if factor == 1 or entry is not SERVER_OPTIMIZERS.built_in.get(entry.name):
        return settings
    rate = float(settings.values_of(entry)[RATE]) * factor
    return dataclasses.replace(settings, **{RATE: rate})  # type: ignore[arg-type]
