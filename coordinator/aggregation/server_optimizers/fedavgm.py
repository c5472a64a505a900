"""FedAvgM: momentum on the server.

T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the effects of non-identical data distribution for federated visual
classification", 2019, arXiv 1909.06335, section 3.2:  v = beta v + step,  w = w + eta v  (step = -gradient).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from coordinator.aggregation.server_optimizers.contract import A, ServerOptimizer, Step
from facility.exchange.registry import Parameter

DECLARATION = ServerOptimizer(
    name="fedavgm",
    summary="server momentum",
    citation="Hsu et al. 2019, arXiv 1909.06335",
    implementation="build",
    parameters=(
        Parameter(
            name="server_learning_rate",
            default=1.0,
            above=0,
            text="Multiplies the aggregated step (eta in Reddi et al.; the outer learning rate in DiLoCo).",
        ),
        Parameter(
            name="momentum",
            default=0.9,
            at_least=0,
            below=1,
            text="Weight of the steps of earlier rounds; beta1 of fedadam, fedyogi and fedadagrad.",
        ),
    ),
    slots=("velocity",),
)


def apply(master: A, step: A, slots: Sequence[A], *, learning_rate: float, momentum: float) -> tuple[A, list[A]]:
    """Next master and velocity."""
    velocity = momentum * slots[0] + step
    return master + learning_rate * velocity, [velocity]


def build(round: int, *, server_learning_rate: float, momentum: float) -> tuple[Step, tuple[float, ...]]:
    """The step function and the first velocity."""
    return partial(apply, learning_rate=server_learning_rate, momentum=momentum), (0.0,)
