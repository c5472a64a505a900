"""The weighted mean, row by row, where a facility counts by what its gradients had there in the round.

M. Matena and C. Raffel, "Merging models with Fisher-weighted averaging", NeurIPS 2022, arXiv 2111.09832, equation 4:
with F_k the diagonal of the Fisher information of facility k, estimated by the mean squares of its gradients,
theta = sum_k n_k F_k theta_k / sum_k n_k F_k. Rows of an embedding that one language alone uses are then moved by that
language, where the plain mean divides its step by the number of facilities.

Here F_k is one number for each row of a tensor (for each value of a vector), from the second moments that travel where
`training.optimizer_state` is `shared`: nothing more is sent. It is divided by its mean over the tensor, so that a
facility's batch size, clipping and loss do not count, but where its gradients are. Its root is taken, in embeddings and
output layers alone, whose rows are tokens (`fisher_power`, `fisher_tensors`): weighing the rows of other matrices
gained little over unlike languages, and lost where models were larger or languages near. Of three facilities and more
each weight is at most doubled or halved in a row, before they are made to sum to 1 (`fisher_largest`), which bounds
what one gains by second moments that its gradients never had: of four alike, 57 % of a row. A tensor for which an
update brings none is averaged plainly.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from coordinator.aggregation.moment_limits import LEAST_FACILITIES
from coordinator.aggregation.rules.contract import AggregationRule, Plan, RoundUpdates
from facility.exchange.checkpoints.floats import Array
from facility.exchange.checkpoints.patterns import matches_any
from facility.exchange.registry import Parameter

DECLARATION = AggregationRule(
    name="fisher",
    summary="mean weighted by each facility's squared gradients, row by row",
    citation="Matena and Raffel 2022, arXiv 2111.09832",
    implementation="plan",
    parameters=(
        Parameter(
            name="fisher_power",
            default=0.5,
            at_least=0.0,
            text="fisher: power of the mean squared gradients in the weights; 1 as published, 0 the plain mean.",
        ),
        Parameter(
            name="fisher_tensors",
            default="*embed* *wte* *lm_head*",
            text="fisher: shell patterns of the tensors whose rows are weighed, separated by spaces; `*` for all.",
        ),
        Parameter(
            name="fisher_largest",
            default=2.0,
            at_least=1.0,
            text="fisher: most that a row multiplies or divides the weight of one of three or more facilities by.",
        ),
    ),
    needs=("squared_gradients",),
)
KEPT_TENSORS = 8
"""Whose weights are kept: as many as threads may be at, and more."""


def row_weights(squares: Array, weights: Array, *, power: float, largest: float) -> Array:
    """Shares of the updates in each row, (updates, rows) in float32; they sum to 1 in every row.

    `squares`: (updates, rows), mean squared gradients, of one scale an update; `weights`: (updates,), the shares
    without them, which an update keeps that has no gradient at all.
    """
    own = squares.mean(1, dtype=np.float64)[:, None]
    relative = np.divide(squares, own, out=np.ones(squares.shape), where=own > 0)
    raised = np.power(relative, power)
    middle = (weights[:, None] * raised).sum(0) / weights.sum()
    factors = np.divide(raised, middle, out=np.ones_like(raised), where=middle > 0)
    shares = weights[:, None] * factors.clip(1 / largest, largest)
    return (shares / shares.sum(0)).astype(np.float32)


def weighted(steps: Array, weights: Array, width: int, offset: int) -> Array:
    """Sum of the rows of `steps`, (updates, n), times their weights at each value.

    `weights`: (updates, rows); `width`: values of a row of the tensor; `offset`: of the first value in the tensor.
    """
    n = steps.shape[1]
    first, last = offset // width, (offset + n - 1) // width
    counts = np.full(last - first + 1, width)
    counts[0] -= offset - first * width
    counts[-1] -= (last + 1) * width - (offset + n)
    total = np.zeros(n, steps.dtype)
    for step, one in zip(steps, weights[:, first : last + 1], strict=True):
        total += step * np.repeat(one.astype(steps.dtype, copy=False), counts)
    return total


def plan(updates: RoundUpdates, *, fisher_power: float, fisher_tensors: str, fisher_largest: float) -> Plan:
    """A weighted sum of its own for every row; the updates' own weights in other tensors, or where nothing is known."""
    plain, squares, patterns = list(updates.weights), updates.squared_gradients, fisher_tensors.split()
    if squares is None:
        return Plan(coefficients=plain, details={"fisher": "not every update brings second moments: the weighted mean"})
    largest = fisher_largest if updates.count >= LEAST_FACILITIES else math.inf

    @functools.lru_cache(maxsize=KEPT_TENSORS)
    def by_row(tensor: str) -> tuple[Array, int] | None:
        """The weights by row of a tensor, and how many values a row has; None where it is averaged plainly."""
        if not matches_any(tensor, patterns) or (found := squares.of(tensor)) is None:
            return None
        return row_weights(found.values, np.array(plain), power=fisher_power, largest=largest), found.width

    def combine(steps: Array, tensor: str, offset: int) -> Array:
        found = by_row(tensor)
        assert found is not None, f"{tensor} is averaged plainly"
        return weighted(steps, *found, offset)

    return Plan(tensor_coefficients=lambda tensor: plain if by_row(tensor) is None else None, combine=combine)
