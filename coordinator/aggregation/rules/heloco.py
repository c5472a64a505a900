"""HeLoCo: late updates turned towards the server optimizer's momentum, tensor by tensor; the others as they are.

"HeLoCo", 2026, arXiv 2606.00271: with c the cosine of a late update's step d and the momentum m, and
conf = |d| / (|d| + 3 |m| + 1e-8), the step that counts is

    c >= 0.2        d
    0 <= c < 0.2    |d| u / |u|,  u = (1 - l) d / |d| + l m / |m|,  l = min((1 - c) conf, 1)
    c < 0           d - b c |d| m / |m|,  b = min(-c conf / 2, 1/2)

so a step across the momentum keeps its length and turns, and one against it loses a part of what goes against it. A
round without late updates, or before there is a momentum, is the weighted mean.

The paper corrects every update, for in its setting each one is late. The correction is a weighted sum of the step and
the momentum, whose weights follow from the inner products of one pass over the tensors.
"""

from __future__ import annotations

import math

import numpy as np

from coordinator.aggregation.rules import mean
from coordinator.aggregation.rules.contract import AggregationRule, Plan, RoundUpdates
from facility.exchange.checkpoints.floats import Array
from facility.exchange.registry import Parameter

DECLARATION = AggregationRule(
    name="heloco",
    summary="weighted mean, late updates turned towards the momentum",
    citation="HeLoCo 2026, arXiv 2606.00271",
    implementation="plan",
    parameters=(
        Parameter(
            name="heloco_staleness",
            default=1,
            at_least=0,
            text="heloco: an update this many rounds late or more is turned; 0: every update.",
        ),
    ),
    needs=("tensor_products", "momentum"),
    lengthens=True,
)
ALIGNED = 0.2
"""Least cosine of a step that is left as it is."""
CAUTION = 3.0
"""Multiple of the momentum's length in the confidence."""


def correction(length: float, momentum: float, along: float) -> tuple[float, float]:
    """Factors of the step and of the momentum in the corrected step.

    `length`, `momentum`: L2 norms of both; `along`: their inner product.
    """
    if length <= 0 or momentum <= 0:
        return 1.0, 0.0
    cosine = max(-1.0, min(1.0, along / length / momentum))
    confidence = length / (length + CAUTION * momentum + 1e-8)
    if cosine >= ALIGNED:
        return 1.0, 0.0
    if cosine < 0:
        return 1.0, -min(-0.5 * cosine * confidence, 0.5) * cosine * length / momentum
    turn = min((1 - cosine) * confidence, 1.0)
    norm = math.sqrt((1 - turn) ** 2 + turn**2 + 2 * turn * (1 - turn) * cosine)
    return (1 - turn) / norm, turn * length / momentum / norm


def coefficients(updates: RoundUpdates, gram: Array, along: Array, least: int) -> list[float]:
    """Coefficients of each step, and last of the momentum, in the weighted sum of one tensor."""
    found, momentum = [], 0.0
    late = list(updates.staleness) or [0] * updates.count
    norms = np.sqrt(np.maximum(gram.diagonal(), 0.0))
    length = math.sqrt(max(float(along[-1]), 0.0))
    for weight, norm, product, behind in zip(updates.weights, norms, along[:-1], late, strict=True):
        own, other = correction(float(norm), length, float(product)) if behind >= least else (1.0, 0.0)
        found.append(weight * own)
        momentum += weight * other
    return [*found, momentum]


def plan(updates: RoundUpdates, *, heloco_staleness: int) -> Plan:
    """A weighted sum of its own for every tensor."""
    assert updates.tensor_products is not None and updates.momentum_products is not None
    products = updates.momentum_products
    chosen = {
        name: coefficients(updates, gram, products[name], heloco_staleness)
        for name, gram in updates.tensor_products.items()
    }
    turned = [
        name for name, behind in zip(updates.facilities, updates.staleness, strict=False) if behind >= heloco_staleness
    ]
    return Plan(
        combine=lambda steps, tensor, offset: mean.combine(steps, chosen[tensor]), details={"turned": sorted(turned)}
    )
