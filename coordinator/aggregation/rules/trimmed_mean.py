"""Coordinate-wise trimmed mean: each value on its own, without the largest and the smallest.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, "Byzantine-robust distributed learning: towards optimal statistical
rates", ICML 2018, arXiv 1803.01498, definition 2.
"""

from __future__ import annotations

from coordinator.aggregation.rules.contract import AggregationRule, Plan, RoundUpdates
from facility.exchange.checkpoints.floats import Array
from facility.exchange.registry import Parameter

DECLARATION = AggregationRule(
    name="trimmed_mean",
    summary="coordinate-wise trimmed mean",
    citation="Yin et al. 2018, arXiv 1803.01498",
    implementation="plan",
    parameters=(
        Parameter(
            name="trim",
            default=0.2,
            at_least=0,
            below=0.5,
            text="Share of updates that trimmed_mean drops at either end (at least one when above 0).",
        ),
    ),
    needs=("sorted_values",),
    minimum_updates="minimum_updates",
)


def dropped(updates: int, trim: float) -> int:
    """Updates dropped at either end: floor(trim * updates), but at least one when `trim` is above 0."""
    return max(1, int(trim * updates + 1e-9)) if trim else 0


def combine(ordered: Array, count: int) -> Array:
    """Mean of each column, in ascending order, without its `count` first and `count` last values."""
    rows = ordered[count : len(ordered) - count]
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total / total.dtype.type(len(rows))


def plan(updates: RoundUpdates, *, trim: float) -> Plan:
    """How many values are dropped at either end."""
    drop = dropped(updates.count, trim)
    return Plan(combine=lambda ordered, tensor, offset: combine(ordered, drop), details={"dropped_at_either_end": drop})


def minimum_updates(*, trim: float) -> int:
    """One must be left when both ends are gone."""
    return 3 if trim else 1
