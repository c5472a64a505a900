"""SlowMo: slow momentum between rounds, in units of the facilities' learning rate.

J. Wang, V. Tantia, N. Ballas, M. Rabbat, "SlowMo: improving communication-efficient distributed SGD with slow
momentum", ICLR 2020, arXiv 1910.00643, algorithm 1:  u = beta u + step / gamma,  x = x + alpha gamma u.
With a constant gamma it is FedAvgM; with a schedule the velocity outlives a change of gamma.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from coordinator.aggregation.server_optimizers.contract import A, ServerOptimizer, Step
from facility.exchange.registry import Parameter

DECLARATION = ServerOptimizer(
    name="slowmo",
    summary="slow momentum",
    citation="Wang et al. 2020, arXiv 1910.00643",
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
        Parameter(
            name="slowmo_learning_rate",
            default=1.0,
            above=0,
            text="The facilities' learning rate by which SlowMo divides the step (gamma); 1 leaves it as it is.",
        ),
    ),
    slots=("slow_momentum",),
)


def apply(
    master: A, step: A, slots: Sequence[A], *, learning_rate: float, momentum: float, local_learning_rate: float
) -> tuple[A, list[A]]:
    """Next master and slow momentum; `learning_rate` is alpha, `local_learning_rate` gamma."""
    slow = momentum * slots[0] + step / local_learning_rate
    return master + (learning_rate * local_learning_rate) * slow, [slow]


def build(
    round: int,
    *,
    server_learning_rate: float,
    momentum: float,
    slowmo_learning_rate: float,
) -> tuple[Step, tuple[float, ...]]:
    """The step function and the first slow momentum."""
    step = partial(
        apply, learning_rate=server_learning_rate, momentum=momentum, local_learning_rate=slowmo_learning_rate
    )
    return step, (0.0,)
