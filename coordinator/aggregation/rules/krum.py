"""Krum: the update that is closest to its neighbours.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, "Machine learning with adversaries: Byzantine tolerant
gradient descent", NeurIPS 2017, arXiv 1703.02757, section 4: the score of an update is the sum of its squared distances
to its n - f - 2 closest others; Krum takes the one with the least; n >= 2 f + 3.
"""

from __future__ import annotations

import numpy as np

from coordinator.aggregation.rules.contract import AggregationRule, Plan, RoundUpdates
from facility.exchange.checkpoints.floats import Array
from facility.exchange.registry import Parameter

DECLARATION = AggregationRule(
    name="krum",
    summary="the update closest to its neighbours",
    citation="Blanchard et al. 2017, arXiv 1703.02757",
    implementation="plan",
    parameters=(
        Parameter(
            name="byzantine",
            default=0,
            at_least=0,
            text="Updates that may be hostile (f of krum, multi_krum and bulyan).",
        ),
    ),
    needs=("inner_products",),
    minimum_updates="minimum_updates",
)


def squared_distances(inner_products: Array) -> Array:
    """Squared L2 distances between the updates."""
    norms = inner_products.diagonal()
    return np.maximum(norms[:, None] + norms[None, :] - 2 * inner_products, 0)


def scores(distances: Array, byzantine: int) -> Array:
    """Krum's score of each update; `distances` are squared."""
    neighbours = max(1, len(distances) - byzantine - 2)
    others = [np.sort(np.delete(row, i)) for i, row in enumerate(distances)]
    return np.array([row[:neighbours].sum() for row in others])


def select(inner_products: Array, byzantine: int, *, most: int) -> list[int]:
    """Indices of the `most` updates with the least scores, in their order; ties go to the earlier one."""
    ranked = np.argsort(scores(squared_distances(inner_products), byzantine), kind="stable")
    return sorted(int(i) for i in ranked[:most])


def mean_of(chosen: list[int], updates: RoundUpdates) -> Plan:
    """The plain mean of the chosen updates."""
    return Plan(
        coefficients=[1 / len(chosen) if i in chosen else 0.0 for i in range(updates.count)],
        details={"selected": [updates.facilities[i] for i in chosen]},
    )


def plan(updates: RoundUpdates, *, byzantine: int) -> Plan:
    """The update with the least score."""
    assert updates.inner_products is not None
    return mean_of(select(updates.inner_products, byzantine, most=1), updates)


def minimum_updates(*, byzantine: int) -> int:
    """2 f + 3."""
    return 2 * byzantine + 3
