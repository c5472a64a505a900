"""Sums of weighted steps that several coordinators make in a tree, with the bits of one that takes all updates.

Floating-point addition depends on its order, so a mean of means is another model than the mean. Whole numbers do not:
each weighted step is rounded once to a multiple of one unit, a power of two that all coordinators agree on before the
round, and from there on only integers are added. Any tree, any order of arrival and any number of levels give the same
integers, and one rounding at the root gives the same bits (the reproducible summation of Demmel and Nguyen 2015,
"Parallel Reproducible Summation", IEEE Transactions on Computers 64(7), with one bin).

The unit follows from a bound on the magnitude of a weighted step, as the clipping of secure aggregation has one: with
62 bits for the sum of N updates, a step is rounded to about 2^-62 N times the bound, far below the last bit of a
float32 for the numbers of updates that are of interest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from facility.exchange.errors import InputError

Integers = NDArray[np.int64]
SUM_BITS = 62
"""Of a sum's magnitude in an int64."""
STEP_BITS = 52
"""Of a rounded step's magnitude: what float64 holds exactly."""


def unit_exponent(bound: float, updates: int) -> int:
    """The unit is 2 to this power: fine enough that `updates` steps of magnitude `bound` fill the integer."""
    if not (math.isfinite(bound) and bound > 0 and updates >= 1):
        raise InputError(f"bound is {bound}, updates {updates}: expected a finite number above 0, and 1 or more")
    largest = math.frexp(bound)[1]
    return largest - min(STEP_BITS, SUM_BITS - math.ceil(math.log2(updates)))


def as_integers(step: NDArray[np.floating], weight: float, exponent: int, bound: float) -> Integers:
    """`weight` times a step, in units. Raises `InputError` for a value that is not finite or beyond the bound."""
    values = step.astype(np.float64) * weight
    if not (np.isfinite(values).all() and (np.abs(values) <= bound).all()):
        raise InputError(f"a weighted step holds NaN, infinity or a magnitude above the agreed bound of {bound:g}")
    return np.rint(np.ldexp(values, -exponent)).astype(np.int64)


def merged(sums: Iterable[Integers]) -> Integers:
    """The sum of partial sums, in whatever order they come."""
    total: Integers | None = None
    for one in sums:
        total = one.copy() if total is None else np.add(total, one, out=total)
    if total is None:
        raise InputError("no partial sum came, expected at least one")
    return total


def in_a_tree(leaves: Sequence[Integers], fan_in: int) -> Integers:
    """The same sum by coordinators that take `fan_in` partial sums each, level by level."""
    if fan_in < 2:
        raise InputError(f"fan_in is {fan_in}, expected 2 or more")
    level = list(leaves)
    while len(level) > 1:
        level = [merged(level[start : start + fan_in]) for start in range(0, len(level), fan_in)]
    return merged(level)


def as_step(total: Integers, exponent: int, dtype: type[np.floating] = np.float32) -> NDArray[np.floating]:
    """The step of the round, rounded once."""
    high = total >> 31  # two exact halves: an int64 has more digits than a float64
    low = total - (high << 31)
    whole = np.ldexp(high.astype(np.float64), 31 + exponent) + np.ldexp(low.astype(np.float64), exponent)
    return whole.astype(dtype)
