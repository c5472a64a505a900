"""Coordinate-wise trimmed mean: each value on its own, without the largest and the smallest.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, "Byzantine-robust distributed learning: towards optimal statistical
rates", ICML 2018, arXiv 1803.01498, definition 2.
"""

from __future__ import annotations

import numpy as np

from facility.exchange.checkpoints.floats import Array
from facility.exchange.errors import InputError


def dropped(updates: int, trim: float) -> int:
    """Updates dropped at either end: floor(trim * updates), but at least one when `trim` is above 0."""
    count = max(1, int(trim * updates + 1e-9)) if trim else 0
    if 2 * count >= updates:
        raise InputError(
            f"a trimmed mean that drops {count} at either end needs at least {2 * count + 1} updates, found {updates}"
        )
    return count


def combine(steps: Array, count: int) -> Array:
    """Mean of each column without its `count` largest and `count` smallest values."""
    ordered = np.sort(steps, axis=0)
    return _mean(ordered[count : len(steps) - count])


def _mean(rows: Array) -> Array:
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total / total.dtype.type(len(rows))
