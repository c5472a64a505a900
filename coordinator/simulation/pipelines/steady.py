"""Long batches from short ones: past its filling, an iteration grows by the same seconds for each micro-batch more.

A schedule without stalls is a max-plus linear system, whose times grow periodically after a transient (Baccelli, Cohen,
Olsder, Quadrat 1992, "Synchronization and Linearity", theorem 3.109). So an iteration of thousands of micro-batches is
simulated with a few hundred, twice, and continued: value(M) = high + periods (high - low). The two lengths differ by a
multiple of the stages, and M by one of that from either, so that cycles of several micro-batches are met as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from coordinator.simulation.pipelines.layout import Layout

Number = TypeVar("Number", float, NDArray[np.float64])
NODES = 8_000
"""Computations and messages of the longer of the two: a fifth of a second."""
PERIOD = 48
"""Micro-batches that the two differ by, as near as the stages allow."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Micro-batches that stand for more: `high + periods * (high - low)` of them."""

    low: int
    high: int
    periods: float

    def continued(self, low: Number, high: Number) -> Number:
        """What is `low` and `high` with these micro-batches, with all."""
        return high + self.periods * (high - low)


def lengths(layout: Layout, micro_batches: int, *, pipelines: int = 1) -> Lengths | None:
    """Which ones stand for `micro_batches` of one of `pipelines` that are simulated at once; None: no fewer do."""
    stages, chunks = layout.stages, layout.chunks
    if layout.virtual_stages > 1 and micro_batches % stages:
        return None  # rounds of another length than any shorter batch's
    period = stages * max(1, PERIOD // stages)
    least = max(2 * chunks, NODES // (4 * chunks * pipelines) - 2 * period)
    low = least + (micro_batches - least) % period
    periods = (micro_batches - low) // period - 1
    return Lengths(low=low, high=low + period, periods=periods) if periods >= 1 else None


def shorter(layout: Layout) -> tuple[Lengths, Layout, Layout] | None:
    """The two lengths for all replicas together, and layouts of these lengths.

    Unequal shares keep their proportions up to rounding, which may be half a percent off.
    """
    counts = layout.micro_batches
    most = max(counts)
    found = lengths(layout, most, pipelines=len(counts))
    if found is None:
        return None
    if min(counts) == most:
        low, high = ((count,) * len(counts) for count in (found.low, found.high))
    else:
        unit = layout.stages if layout.virtual_stages > 1 else 1
        half = found.high / 2 / most / unit
        low = tuple(round(count * half) * unit for count in counts)
        if min(low) < 2 * layout.chunks:
            return None
        high = tuple(2 * count for count in low)
        found = replace(found, periods=sum(counts) / sum(low) - 2)
    return found, replace(layout, micro_batches=low), replace(layout, micro_batches=high)
