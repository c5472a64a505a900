"""Coordinate-wise median: each value on its own, every update counts the same.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, "Byzantine-robust distributed learning: towards optimal statistical
rates", ICML 2018, arXiv 1803.01498, definition 1. Of an even number, the mean of the two in the middle.
"""

from __future__ import annotations

import numpy as np

from coordinator.aggregation.rules.contract import AggregationRule, Plan, RoundUpdates
from facility.exchange.checkpoints.floats import Array

DECLARATION = AggregationRule(
    name="median",
    summary="coordinate-wise median",
    citation="Yin et al. 2018, arXiv 1803.01498",
    implementation="plan",
    needs=("sorted_values",),
)


def combine(steps: Array) -> Array:
    """Median of each column."""
    return middle(np.sort(steps, axis=0))


def middle(ordered: Array) -> Array:
    """Median of each column of rows in ascending order."""
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) * ordered.dtype.type(0.5)


def plan(updates: RoundUpdates) -> Plan:
    """The middle of the sorted values."""
    return Plan(combine=lambda ordered, tensor, offset: middle(ordered))
