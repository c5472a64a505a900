"""The server optimizers by name."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.aggregation.server_optimizers.contract import ServerOptimizer, Step
from facility.exchange.registry import Registry, Value

SERVER_OPTIMIZERS = Registry(
    kind="server optimizer",
    package="coordinator.aggregation.server_optimizers",
    entry_points="crossfed.server_optimizers",
    declaration=ServerOptimizer,
)


def build(name: str, round: int, parameters: Mapping[str, Value]) -> tuple[Step, tuple[float, ...]]:
    """The optimizer's step function in round `round`, and the first value of each slot."""
    return SERVER_OPTIMIZERS.call(name, round, **parameters)
