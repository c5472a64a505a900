"""How much is read of each of several inputs: shares by weights or by temperature, without repeating a document.

Of an input of size s and weight w the share (w / s) / max(w / s) is read, evenly spread: the input that is short for
its weight is read whole, and of the others what keeps the proportions. With a temperature T the weights are s^(1/T)
(Arivazhagan et al. 2019, arXiv 1907.05019, section 3.2): 1 leaves the inputs as they are, a large T reads as much of
each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from facility.dataset import DatasetError

EXACT = 1_000_000
"""Largest denominator of a share."""


def input_shares(sizes: Sequence[int], *, weights: Sequence[float] = (), temperature: float = 1.0) -> list[Fraction]:
    """Share of each input that is read; the largest is 1. Raises `DatasetError` for weights that cannot be used."""
    if weights and temperature != 1:
        raise DatasetError("weights and a temperature are both given: the temperature stands for weights; give one")
    if weights and len(weights) != len(sizes):
        raise DatasetError(f"there are {len(weights)} weights for {len(sizes)} inputs; give one for each --input")
    if not all(math.isfinite(one) and one > 0 for one in weights):
        raise DatasetError(f"weights are {list(weights)}, expected numbers above 0")
    if not (math.isfinite(temperature) and temperature >= 1):
        raise DatasetError(f"the temperature is {temperature}, expected 1 or more")
    if not weights and temperature == 1:
        return [Fraction(1)] * len(sizes)
    if not all(sizes):
        raise DatasetError(
            "an input has no known size (a streamed dataset), so its share cannot be computed; leave it out"
        )
    wanted = list(weights) or [size ** (1 / temperature) for size in sizes]
    dense = [weight / size for weight, size in zip(wanted, sizes, strict=True)]
    return [Fraction(one / max(dense)).limit_denominator(EXACT) for one in dense]


def is_chosen(index: int, share: Fraction) -> bool:
    """Whether document `index` of an input is among its share, evenly spread from the first on."""
    return math.ceil((index + 1) * share) > math.ceil(index * share)
