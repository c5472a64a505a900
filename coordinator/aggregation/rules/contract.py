"""What an aggregation rule is: one file, of this package or of any other, with a declaration and a function.

    DECLARATION = AggregationRule(
        name="scaled_mean",
        implementation="plan",
        parameters=(Parameter(name="scale", default=1.0, above=0, text="Multiplies every weight."),),
    )

    def plan(updates: RoundUpdates, *, scale: float) -> Plan:
        return Plan(coefficients=[scale * weight for weight in updates.weights])

The function is called once a round, with the declared parameters as keywords. It decides either the coefficients of a
weighted sum of the updates' steps, for all tensors or for each, or a function that combines the steps value by value
while the tensors stream by.
`rule: my_package.my_module` in the settings uses a file from outside (`facility.exchange.registry`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from facility.exchange.checkpoints.floats import Array
from facility.exchange.registry import Declaration

Combine = Callable[[Array, str, int], Array]
"""(steps of shape (updates, n), tensor, offset of the first value) -> n values."""
TensorCoefficients = Callable[[str], Sequence[float] | None]
"""Tensor -> its coefficients, or None where it is not a weighted sum. May be called from any thread."""

INNER_PRODUCTS = "inner_products"
"""The inner products of all pairs of steps, from a first pass over the updates."""
TENSOR_PRODUCTS = "tensor_products"
"""The inner products of all pairs of steps, for every tensor by itself, from a first pass over the updates."""
HISTOGRAMS = "histograms"
"""A histogram of each update's magnitudes (`facility.exchange.checkpoints.magnitudes`), from a first pass."""
MOMENTUM = "momentum"
"""The steps' inner products with the server optimizer's momentum, by tensor; `combine` is given the momentum as a last
row of the steps. Needs an optimizer whose first slot is the velocity."""
SQUARED_GRADIENTS = "squared_gradients"
"""The mean squares of each facility's gradients in the round, row by row (`SquaredGradients`)."""
SORTED_VALUES = "sorted_values"
"""`combine` is given every value's steps in ascending order, in place of the order of the facilities."""


@dataclass(frozen=True)
class RowSquares:
    """Squared gradients of one tensor, by update and row; a row is what one index of the first dimension selects."""

    values: Array
    """(updates, rows), float32, none of them negative."""
    width: int
    """Values of a row."""


class SquaredGradients(Protocol):
    """What AdamW's second moments say of a round: they travel where `training.optimizer_state` is `shared`."""

    def of(self, tensor: str) -> RowSquares | None:
        """None where some update brings none of it. May be called from any thread."""


@dataclass(frozen=True, kw_only=True)
class AggregationRule(Declaration):
    """One way to combine the updates of a round into a step.

    `implementation` names a function (RoundUpdates, *, parameters) -> Plan; `needs` what it is given beyond names and
    weights: `inner_products`, `tensor_products`, `histograms`, `squared_gradients`, `sorted_values`, `momentum`.
    """

    minimum_updates: str = ""
    """Name of a function of the same file, (*, parameters) -> least number of updates; empty: one is enough."""
    lengthens: bool = False
    """A step may be longer than every update's, which would take a variance below zero: the running statistics of batch
    normalisation are averaged plainly, whatever the plan says."""


@dataclass(frozen=True, kw_only=True)
class RoundUpdates:
    """What a rule sees of a round before the tensors stream by."""

    facilities: Sequence[str]
    """Names, in the order of all that follows."""
    weights: Sequence[float]
    """Share of each update, summing to 1."""
    number: int = 0
    """Of the round, from 0."""
    inner_products: Array | None = None
    """(updates, updates), of the clipped steps; where the rule needs them."""
    tensor_products: Mapping[str, Array] | None = None
    """Inner products of the steps by tensor; where the rule needs them."""
    momentum_products: Mapping[str, Array] | None = None
    """(updates + 1,) by tensor: of the clipped steps with the momentum, and last of the momentum with itself; where the
    rule needs them."""
    staleness: Sequence[int] = ()
    """Rounds that each update is late; empty: none is."""
    histograms: Sequence[Array] | None = None
    """Of each update's magnitudes before clipping; where the rule needs them."""
    squared_gradients: SquaredGradients | None = None
    """Where the rule needs them and every update brings second moments."""
    clip_factors: Sequence[float] = ()
    """What clipping multiplies each update's step by; empty: nothing is clipped."""

    @property
    def count(self) -> int:
        """Number of updates."""
        return len(self.facilities)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the steps of a round become one."""

    coefficients: list[float] | None = None
    """The step is the sum of the updates' steps times these."""
    tensor_coefficients: TensorCoefficients | None = None
    """Of weighted sums that are not the same for every tensor, in place of `coefficients`."""
    combine: Combine | None = None
    """Value by value, where the rule, or what it does to some tensors, is not a weighted sum."""
    details: dict[str, Any] = field(default_factory=dict)
    """What the rule decided, for round.json."""

    def coefficients_of(self, tensor: str) -> Sequence[float] | None:
        """Coefficients of the weighted sum for one tensor; None where `combine` works value by value."""
        return self.coefficients if self.tensor_coefficients is None else self.tensor_coefficients(tensor)
