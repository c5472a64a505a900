"""Multi-Krum: the mean of the n - f updates that Krum ranks first.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, "Machine learning with adversaries: Byzantine tolerant
gradient descent", NeurIPS 2017, arXiv 1703.02757, section 4.
"""

from __future__ import annotations

from coordinator.aggregation.rules import krum
from coordinator.aggregation.rules.contract import AggregationRule, Plan, RoundUpdates
from facility.exchange.registry import Parameter

DECLARATION = AggregationRule(
    name="multi_krum",
    summary="mean of the updates that krum ranks first",
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


def plan(updates: RoundUpdates, *, byzantine: int) -> Plan:
    """The mean of the n - f updates with the least scores."""
    assert updates.inner_products is not None
    chosen = krum.select(updates.inner_products, byzantine, most=updates.count - byzantine)
    return krum.mean_of(chosen, updates)


def minimum_updates(*, byzantine: int) -> int:
    """2 f + 3."""
    return 2 * byzantine + 3
