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

from coordinator.aggregation.rules.contract import AggregationRule, Plan, RoundUpdates
from facility.exchange.checkpoints.floats import Array
from facility.exchange.checkpoints.magnitudes import threshold_for
from facility.exchange.registry import Parameter

DECLARATION = AggregationRule(
    name="ties",
    summary="trim, elect sign, disjoint mean",
    citation="Yadav et al. 2023, arXiv 2306.01708",
    implementation="plan",
    parameters=(
        Parameter(
            name="density", default=0.2, above=0, at_most=1, text="Share of each update that ties and dare keep."
        ),
    ),
    needs=("histograms",),
)


def combine(steps: Array, weights: Sequence[float], thresholds: Sequence[float], factors: Sequence[float]) -> Array:
    """Disjoint weighted mean of the values that pass their update's threshold and have the elected sign.

    `factors`: what clipping multiplied the steps by. The thresholds, of steps before that, are multiplied as they were,
    in their dtype: many values of an update are its threshold, and rounded otherwise all of these would be below it.
    """
    limits = np.asarray(thresholds, steps.dtype) * np.asarray(factors, steps.dtype)
    kept = np.where(np.abs(steps) >= limits[:, None], steps, 0)
    weighted = kept * np.asarray(weights, steps.dtype)[:, None]
    elected = np.sign(weighted.sum(axis=0))
    agrees = (np.sign(kept) == elected) & (kept != 0)
    mass = np.where(agrees, np.asarray(weights, steps.dtype)[:, None], 0).sum(axis=0)
    total = np.where(agrees, weighted, 0).sum(axis=0)
    return np.divide(total, mass, out=np.zeros_like(total), where=mass > 0)


def plan(updates: RoundUpdates, *, density: float) -> Plan:
    """The threshold of each update."""
    assert updates.histograms is not None
    thresholds = [threshold_for(counts, density) for counts in updates.histograms]
    factors = updates.clip_factors or [1.0] * updates.count
    return Plan(
        combine=lambda steps, tensor, offset: combine(steps, updates.weights, thresholds, factors),
        details={"thresholds": dict(zip(updates.facilities, thresholds, strict=True))},
    )
