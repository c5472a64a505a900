"""Radial-directional averaging: the mean of the lengths along the mean of the directions, tensor by tensor.

A. Douillard et al., "Decoupled DiLoCo", 2026, arXiv 2604.21428: with phi(x) = x / |x| and phi(0) = 0, the step of a
tensor is (sum w |v| / sum w) phi(sum w phi(v)). The mean of M unlike steps is shorter than each of them by about
sqrt(M); this one is as long as they are, whatever their number. Where the directions cancel, and for embeddings and the
output layer, it is the plain mean. A tensor's step is a weighted sum of the updates' steps, whose weights follow from
the tensor's inner products: one pass over the tensors measures them, and nothing but these products is kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from coordinator.aggregation.rules.contract import AggregationRule, Plan, RoundUpdates
from facility.exchange.checkpoints.floats import Array
from facility.exchange.checkpoints.patterns import matches_any
from facility.exchange.registry import Parameter

DECLARATION = AggregationRule(
    name="radial_directional",
    summary="mean length along the mean direction, per tensor",
    citation="Douillard et al. 2026, arXiv 2604.21428",
    implementation="plan",
    parameters=(
        Parameter(
            name="plain_mean",
            default="*embed* *wte* *wpe* *lm_head*",
            text="radial_directional: shell patterns of the tensors that are averaged plainly, separated by spaces.",
        ),
    ),
    needs=("tensor_products",),
    lengthens=True,
)
CANCELLED = 1e-3
"""Mean directions shorter than this point nowhere. The square of their length is a sum that cancels, and steps are
summed in float32: shorter ones, as the paper's 1e-12, are rounding, and made steps hundreds of times too long."""


def coefficients(gram: Array, weights: Array) -> Array:
    """Factors of the steps in their radial-directional mean. `gram`: their inner products; `weights` sum to 1."""
    gram, weights = np.asarray(gram, np.float64), np.asarray(weights, np.float64)
    norms = np.sqrt(np.maximum(gram.diagonal(), 0.0))
    directions = np.divide(weights, norms, out=np.zeros_like(weights), where=norms > 0)
    length = float(np.sqrt(max(float(directions @ gram @ directions), 0.0)))
    if length < CANCELLED:
        return weights
    return directions * (float(weights @ norms) / float(weights.sum()) / length)


def plan(updates: RoundUpdates, *, plain_mean: str) -> Plan:
    """A weighted sum of its own for every tensor."""
    assert updates.tensor_products is not None
    weights, patterns = np.array(updates.weights), plain_mean.split()
    chosen: Mapping[str, list[float]] = {
        name: weights.tolist() if matches_any(name, patterns) else coefficients(gram, weights).tolist()
        for name, gram in updates.tensor_products.items()
    }
    return Plan(tensor_coefficients=chosen.__getitem__)
