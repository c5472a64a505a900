"""SlowMo: slow momentum between rounds, in units of the facilities' learning rate.

J. Wang, V. Tantia, N. Ballas, M. Rabbat, "SlowMo: improving communication-efficient distributed SGD with slow
momentum", ICLR 2020, arXiv 1910.00643, algorithm 1:  u = beta u + step / gamma,  x = x + alpha gamma u.
With a constant gamma it is FedAvgM; with a schedule the velocity outlives a change of gamma.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

A = Any
"""A numpy array or a torch tensor."""


def starts() -> tuple[float]:
    """The slow momentum starts at zero."""
    return (0.0,)


def apply(
    master: A, step: A, slots: Sequence[A], *, learning_rate: float, momentum: float, local_learning_rate: float
) -> tuple[A, list[A]]:
    """Next master and slow momentum; `learning_rate` is alpha, `local_learning_rate` gamma."""
    slow = momentum * slots[0] + step / local_learning_rate
    return master + (learning_rate * local_learning_rate) * slow, [slow]
