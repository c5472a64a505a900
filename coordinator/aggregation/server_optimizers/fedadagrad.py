"""FedAdagrad: Adagrad on the server.

S. Reddi et al., "Adaptive federated optimization", ICLR 2021, arXiv 2003.00295, algorithm 2:
m = beta1 m + (1 - beta1) step,  v = v + step^2,
x = x + eta m / (sqrt(v) + tau), with v starting at tau squared and no bias correction.
"""

from __future__ import annotations

from coordinator.aggregation.server_optimizers.contract import ServerOptimizer, Step
from coordinator.aggregation.server_optimizers.fedadam import adaptive
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


def build(round: int, *, server_learning_rate: float, momentum: float, tau: float) -> tuple[Step, tuple[float, float]]:
    """The step function and the first values of both moments."""
    return adaptive(
        lambda second, square: second + square, server_learning_rate=server_learning_rate, momentum=momentum, tau=tau
    )
