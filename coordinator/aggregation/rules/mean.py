"""The weighted mean of the round's steps.

H. B. McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017,
arXiv 1602.05629, algorithm 1 (FederatedAveraging): w = sum_k (n_k / n) w_k.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.aggregation.rules.contract import AggregationRule, Plan, RoundUpdates
from facility.exchange.checkpoints.floats import Array

DECLARATION = AggregationRule(
    name="mean",
    summary="weighted mean",
    citation="McMahan et al. 2017, arXiv 1602.05629",
    implementation="plan",
)


def combine(
    steps: Array, coefficients: Sequence[float], total: Array | None = None, scratch: Array | None = None
) -> Array:
    """Sum of the rows of `steps` times their coefficients, added in the rows' order."""
    total = np.multiply(steps[0], coefficients[0], out=total)
    for row, coefficient in zip(steps[1:], coefficients[1:], strict=True):
        scratch = np.multiply(row, coefficient, out=scratch)
        np.add(total, scratch, out=total)
    return total


def plan(updates: RoundUpdates) -> Plan:
    """The updates' own weights."""
    return Plan(coefficients=list(updates.weights))
