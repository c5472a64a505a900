"""FedAdagrad: Adagrad on the server.

S. Reddi et al., "Adaptive federated optimization", ICLR 2021, arXiv 2003.00295, algorithm 2:
m = beta1 m + (1 - beta1) step,  v = v + step^2,
x = x + eta m / (sqrt(v) + tau), with v starting at tau squared and no bias correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

A = Any
"""A numpy array or a torch tensor."""


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
