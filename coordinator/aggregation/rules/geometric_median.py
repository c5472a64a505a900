"""The smoothed geometric median: the point with the least weighted sum of distances to the updates.

K. Pillutla, S. Kakade, Z. Harchaoui, "Robust aggregation for federated learning", IEEE Transactions on Signal
Processing 2022, arXiv 1912.13445, algorithm 2 (smoothed Weiszfeld). Every iterate is a weighted sum of the updates, so
all distances follow from their inner products: one pass over the tensors is enough for any number of iterations.
"""

from __future__ import annotations

import numpy as np

from coordinator.aggregation.rules.contract import AggregationRule, Plan, RoundUpdates
from facility.exchange.checkpoints.floats import Array
from facility.exchange.registry import Parameter

DECLARATION = AggregationRule(
    name="geometric_median",
    summary="smoothed geometric median",
    citation="Pillutla et al. 2022, arXiv 1912.13445",
    implementation="plan",
    parameters=(Parameter(name="iterations", default=8, above=0, text="Weiszfeld iterations of geometric_median."),),
    needs=("inner_products",),
)


def coefficients(gram: Array, weights: Array, *, iterations: int, smoothing: float = 1e-6) -> Array:
    """Weights of the updates in their geometric median, summing to 1.

    `smoothing`: distances below this share of the largest norm count as it (nu in the paper).
    """
    gram, weights = np.asarray(gram, np.float64), np.asarray(weights, np.float64)
    floor = smoothing * max(float(np.sqrt(gram.diagonal().max())), 1e-30)
    beta = weights / weights.sum()
    for _ in range(iterations):
        squared = gram.diagonal() - 2 * gram @ beta + beta @ gram @ beta
        beta = weights / np.maximum(np.sqrt(np.maximum(squared, 0)), floor)
        beta = beta / beta.sum()
    return beta


def plan(updates: RoundUpdates, *, iterations: int) -> Plan:
    """The updates' weights in their geometric median."""
    assert updates.inner_products is not None
    found = coefficients(updates.inner_products, np.array(updates.weights), iterations=iterations)
    return Plan(coefficients=found.tolist())
