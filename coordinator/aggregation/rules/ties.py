"""TIES-merging: trim small changes, elect a sign for each value, average those that agree.

P. Yadav, D. Tam, L. Choshen, C. Raffel, M. Bansal, "TIES-merging: resolving interference when merging models",
NeurIPS 2023, arXiv 2306.01708, algorithm 1. The scale lambda is the server learning rate. Weights enter both the
election and the mean; with equal ones it is the paper's rule.

"The largest 20 %" of an update is found from a histogram of magnitudes, so that one streaming pass suffices: the
threshold lies on the grid of bfloat16 numbers, and the kept share is the density or a little more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from facility.exchange.checkpoints.floats import Array

BINS = 1 << 15


def histogram(values: Array) -> Array:
    """How many magnitudes fall between one bfloat16 number and the next."""
    bits = np.abs(np.asarray(values, np.float32)).view(np.uint32) >> 16
    return np.bincount(bits, minlength=BINS)


def threshold(counts: Array, density: float) -> float:
    """The largest grid value that at least `density` of all magnitudes reach."""
    reached = np.cumsum(counts[::-1])[::-1]
    wanted = density * reached[0]
    place = int(np.nonzero(reached >= wanted)[0][-1]) if reached[0] else 0
    return float(np.array([place << 16], np.uint32).view(np.float32)[0])


def combine(steps: Array, weights: Sequence[float], thresholds: Sequence[float]) -> Array:
    """Disjoint weighted mean of the values that pass their update's threshold and have the elected sign."""
    kept = np.where(np.abs(steps) >= np.asarray(thresholds, steps.dtype)[:, None], steps, 0)
    weighted = kept * np.asarray(weights, steps.dtype)[:, None]
    elected = np.sign(weighted.sum(axis=0))
    agrees = (np.sign(kept) == elected) & (kept != 0)
    mass = np.where(agrees, np.asarray(weights, steps.dtype)[:, None], 0).sum(axis=0)
    total = np.where(agrees, weighted, 0).sum(axis=0)
    return np.divide(total, mass, out=np.zeros_like(total), where=mass > 0)
