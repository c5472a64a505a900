"""FedAdagrad: Adagrad on the server.

S. Reddi et al., "Adaptive federated optimization", ICLR 2021, arXiv 2003.00295, algorithm 2:
m = beta1 m + (1 - beta1) step,  v = v + step^2,
x = x + eta m / (sqrt(v) + tau), with v starting at tau squared and no bias correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from coordinator.aggregation.server_optimizers.contract import A, ServerOptimizer, Step
from facility.exchange.registry import Parameter

DECLARATION = ServerOptimizer(
    name="fedadagrad",
    summary="server Adagrad",
    citation="Reddi et al. 2021, arXiv 2003.00295",
    implementation="build",
    parameters=(
        Parameter(
            name="server_learning_rate",
            default=0.01,
            above=0,
            text="Multiplies the aggregated step (eta in Reddi et al.; the outer learning rate in DiLoCo).",
        ),
        Parameter(
            name="momentum",
            default=0.5,
            at_least=0,
            below=1,
            text="Weight of the steps of earlier rounds; beta1 of fedadam, fedyogi and fedadagrad.",
        ),
        Parameter(name="tau", default=0.001, above=0, text="Adaptivity floor of fedadam, fedyogi and fedadagrad."),
    ),
    slots=("first_moment", "second_moment"),
    own=("second_moment",),  # a sum of squares, where others keep their mean
)


def starts(tau: float) -> tuple[float, float]:
    """First values of the two moments."""
    return 0.0, tau * tau


def apply(
    master: A, step: A, slots: Sequence[A], *, learning_rate: float, momentum: float, tau: float
) -> tuple[A, list[A]]:
    """Next master, first and second moment."""
    first = momentum * slots[0] + (1 - momentum) * step
    square = step * step
    second = slots[1] + square
    return master + learning_rate * first / (second**0.5 + tau), [first, second]


def build(
    round: int,
    *,
    server_learning_rate: float,
    momentum: float,
    tau: float,
) -> tuple[Step, tuple[float, ...]]:
    """The step function and the first values of both moments."""
    step = partial(apply, learning_rate=server_learning_rate, momentum=momentum, tau=tau)
    return step, starts(tau)
