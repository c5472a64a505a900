"""Coordinate-wise median: each value on its own, every update counts the same.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, "Byzantine-robust distributed learning: towards optimal statistical
rates", ICML 2018, arXiv 1803.01498, definition 1. Of an even number, the mean of the two in the middle.
"""

from __future__ import annotations

import numpy as np

from facility.exchange.checkpoints.floats import Array


def combine(steps: Array) -> Array:
    """Median of each column."""
    ordered = np.sort(steps, axis=0)
    middle = len(steps) // 2
    if len(steps) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) * ordered.dtype.type(0.5)
