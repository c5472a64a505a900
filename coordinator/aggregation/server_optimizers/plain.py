"""No optimizer: the master moves by the aggregated step times the server learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from coordinator.aggregation.server_optimizers.contract import A, ServerOptimizer, Step
from facility.exchange.registry import Parameter

DECLARATION = ServerOptimizer(
    name="plain",
    summary="the step times the server learning rate",
    citation="McMahan et al. 2017, arXiv 1602.05629",
    implementation="build",
    parameters=(
        Parameter(
            name="server_learning_rate",
            default=1.0,
            above=0,
            text="Multiplies the aggregated step (eta in Reddi et al.; the outer learning rate in DiLoCo).",
        ),
    ),
)


def add(master: A, step: A, slots: Sequence[A]) -> tuple[A, list[A]]:
    """Next master at a learning rate of 1."""
    return master + step, []


def apply(master: A, step: A, slots: Sequence[A], *, learning_rate: float) -> tuple[A, list[A]]:
    """Next master."""
    return master + learning_rate * step, []


def build(round: int, *, server_learning_rate: float) -> tuple[Step, tuple[float, ...]]:
    """The step function; it keeps no tensors."""
    return (add if server_learning_rate == 1 else partial(apply, learning_rate=server_learning_rate)), ()
