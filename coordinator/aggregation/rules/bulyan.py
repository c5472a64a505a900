"""Bulyan: Krum chooses updates, then each value is the mean of those closest to the median.

E. M. El Mhamdi, R. Guerraoui, S. Rouault, "The hidden vulnerability of distributed learning in Byzantium", ICML 2018,
arXiv 1802.07927, section 4: theta = n - 2 f updates are chosen by repeated Krum, then each coordinate is the mean of
its beta = theta - 2 f values closest to the median; n >= 4 f + 3.
"""

from __future__ import annotations

import numpy as np

from coordinator.aggregation.rules import krum, median
from coordinator.aggregation.rules.contract import AggregationRule, Plan, RoundUpdates
from facility.exchange.checkpoints.floats import Array
from facility.exchange.registry import Parameter

DECLARATION = AggregationRule(
    name="bulyan",
    summary="multi-Krum selection, then a trimmed mean around the median",
    citation="El Mhamdi et al. 2018, arXiv 1802.07927",
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


def select(inner_products: Array, byzantine: int) -> list[int]:
    """Indices of the theta = n - 2 f chosen updates, in their order."""
    count = len(inner_products)
    distances = krum.squared_distances(inner_products)
    left, chosen = list(range(count)), list[int]()
    while len(chosen) < count - 2 * byzantine:
        among = distances[np.ix_(left, left)]
        best = int(np.argmin(krum.scores(among, byzantine))) if len(left) > 1 else 0
        chosen.append(left.pop(best))
    return sorted(chosen)


def combine(chosen: Array, byzantine: int) -> Array:
    """Mean, for each column, of the rows - 2 f values closest to its median."""
    keep = len(chosen) - 2 * byzantine
    centre = median.combine(chosen)
    order = np.argsort(np.abs(chosen - centre), axis=0, kind="stable")[:keep]
    closest = np.take_along_axis(chosen, np.sort(order, axis=0), axis=0)
    total = closest[0].copy()
    for row in closest[1:]:
        total += row
    return total / total.dtype.type(keep)


def plan(updates: RoundUpdates, *, byzantine: int) -> Plan:
    """The chosen updates, then the mean of the values closest to their median."""
    assert updates.inner_products is not None
    chosen = select(updates.inner_products, byzantine)
    return Plan(
        combine=lambda steps, tensor, offset: combine(steps[chosen], byzantine),
        details={"selected": [updates.facilities[i] for i in chosen]},
    )


def minimum_updates(*, byzantine: int) -> int:
    """4 f + 3."""
    return 4 * byzantine + 3
