"""DiLoCo's outer step: SGD with Nesterov momentum on the round's step.

A. Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023, arXiv 2311.08105,
algorithm 1, with the form of Nesterov momentum of I. Sutskever et al. 2013 that PyTorch's SGD uses:
v = mu v + step,  w = w + eta (step + mu v).

The momentum grows with the rounds, t / (t + r) in round t = 0, 1, ..., up to mu. r = 3 is Y. Nesterov's own sequence,
as written in W. Su, S. Boyd, E. Candes, "A differential equation for modeling Nesterov's accelerated gradient method",
JMLR 17 (2016), arXiv 1503.01243, eq. 1, whose damping is r / t. The steps of the first rounds predict later ones
poorly, above all from random weights; over ten rounds r = 3 spends half of them on that, and r = 1 less.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from coordinator.aggregation.server_optimizers.contract import A, ServerOptimizer, Step
from facility.exchange.checkpoints import native
from facility.exchange.registry import Parameter

DECLARATION = ServerOptimizer(
    name="nesterov",
    summary="DiLoCo's outer Nesterov momentum",
    citation="Douillard et al. 2023, arXiv 2311.08105",
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
            default=0.8,
            at_least=0,
            below=1,
            text="Weight of the steps of earlier rounds; beta1 of fedadam, fedyogi and fedadagrad.",
        ),
        Parameter(
            name="momentum_warmup",
            default=True,
            text="nesterov: momentum t / (t + `momentum_friction`) in round t = 0, 1, ... until it reaches `momentum`; "
            "false: from the first round on.",
        ),
        Parameter(
            name="momentum_friction",
            default=3.0,
            above=0,
            text="nesterov: how slowly the momentum grows, where it does: it is a half in the round of this number.",
        ),
    ),
    slots=("velocity",),
)


def momentum_of(round: int, momentum: float, friction: float = 3.0) -> float:
    """Momentum in round `round`, counted from 0."""
    return min(momentum, round / (round + friction))


def apply(master: A, step: A, slots: Sequence[A], *, learning_rate: float, momentum: float) -> tuple[A, list[A]]:
    """Next master and velocity."""
    if (compiled := native.nesterov(learning_rate, momentum, master, step, slots[0])) is not None:
        return compiled[0], [compiled[1]]
    velocity = momentum * slots[0] + step
    return master + learning_rate * (step + momentum * velocity), [velocity]


def build(
    round: int,
    *,
    server_learning_rate: float,
    momentum: float,
    momentum_warmup: bool,
    momentum_friction: float,
) -> tuple[Step, tuple[float, ...]]:
    """The step function and the first velocity."""
    if momentum_warmup:
        momentum = momentum_of(round, momentum, momentum_friction)
    return partial(apply, learning_rate=server_learning_rate, momentum=momentum), (0.0,)
