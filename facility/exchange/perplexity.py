"""From a loss to a perplexity."""

from __future__ import annotations

import math

LARGEST_LOSS = 700.0
"""Nats; exp() of more is not a floating-point number."""


def perplexity(loss: float) -> float:
    """exp(loss), bounded so that it stays a number."""
    return math.exp(min(loss, LARGEST_LOSS))
