"""Histograms of magnitudes on the grid of bfloat16 numbers: a quantile of a whole model from one streaming pass."""

from __future__ import annotations

import numpy as np

from facility.exchange.checkpoints.floats import Array

BINS = 1 << 15


def histogram(values: Array) -> Array:
    """How many magnitudes fall between one bfloat16 number and the next."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return np.bincount((bits >> 16) & 0x7FFF, minlength=BINS)


def threshold_for(counts: Array, density: float, *, smallest: int = 0) -> float:
    """The largest grid value, from bin `smallest` on, that at least a share `density` of all magnitudes reach."""
    reached = np.cumsum(counts[::-1])[::-1]
    place = int(np.nonzero(reached >= density * reached[0])[0][-1]) if reached[0] else 0
    return float(np.array([max(smallest, place) << 16], np.uint32).view(np.float32)[0])
