"""FedAvgM: momentum on the server.

T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the effects of non-identical data distribution for federated visual
classification", 2019, arXiv 1909.06335, section 3.2:  v = beta v + step,  w = w + eta v  (step = -gradient).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

A = Any
"""A numpy array or a torch tensor."""


def starts() -> tuple[float]:
    """The velocity starts at zero."""
    return (0.0,)


def apply(master: A, step: A, slots: Sequence[A], *, learning_rate: float, momentum: float) -> tuple[A, list[A]]:
    """Next master and velocity."""
    velocity = momentum * slots[0] + step
    return master + learning_rate * velocity, [velocity]
