"""What the parts of a pass add to its sums, added in the order of the parts.

Floating-point sums depend on the order of their additions. Within a span all products are added one after the other,
and then the span's sum to the pass's. Where several threads work on parts of the same span, the products of a part are
therefore kept apart, in blocks of a fixed number of values, until it is their turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from coordinator.aggregation.work import Passed
from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.floats import Array


@dataclass(kw_only=True)
class PartSums:
    """What one part found out."""

    name: str
    begins_span: bool
    grams: list[Array] = field(default_factory=list)
    """(blocks, updates, updates) for each piece: inner products, to be added block by block."""
    span: Array | None = None
    """The inner products of the span, to add to at once, where parts are worked on one after the other."""
    along_momentum: list[Array] = field(default_factory=list)
    step_squared: list[float] = field(default_factory=list)
    elements: int = 0
    counted: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def gram(self, updates: int, count: int) -> Array:
        """Where the inner products of a piece of `count` values go."""
        if self.span is not None:
            return self.span
        self.grams.append(np.zeros((-(-count // native.RUN), updates, updates)))
        return self.grams[-1]


class Sums:
    """The sums of a pass."""

    def __init__(self, updates: int, *, by_tensor: bool, apart: bool) -> None:
        """`apart`: several parts are under way at a time."""
        self._total = Passed(gram=np.zeros((updates, updates)))
        self._by_tensor, self._apart = by_tensor, apart
        self._name = ""
        self._gram = np.zeros((updates, updates))
        """Of the span that is under way, as all that follow."""
        self._along: Array | None = None
        self._squared = 0.0

    def part(self, name: str, elements: int, *, begins_span: bool) -> PartSums:
        """For one part of a tensor. Unless `apart`, the one before has been taken."""
        if self._apart:
            return PartSums(name=name, begins_span=begins_span, elements=elements)
        if begins_span:
            self._begin_span(name)
        return PartSums(name=name, begins_span=False, elements=elements, span=self._gram)

    def take(self, part: PartSums) -> None:
        """Add a part, the one after that which was added last."""
        if part.begins_span:
            self._begin_span(part.name)
        for blocks in part.grams:
            _add_blocks(self._gram, blocks)
        for products in part.along_momentum:
            self._along = np.zeros(len(products)) if self._along is None else self._along
            self._along += products
        for squared in part.step_squared:
            self._squared += squared
        total = self._total
        total.elements += part.elements
        total.counted += part.counted
        total.bytes_read += part.bytes_read
        total.bytes_written += part.bytes_written

    def passed(self) -> Passed:
        """The sums of all parts."""
        self._end_span()
        return self._total

    def _begin_span(self, name: str) -> None:
        self._end_span()
        self._name = name

    def _end_span(self) -> None:
        total, name = self._total, self._name
        if not name:
            return
        total.gram += self._gram
        if self._by_tensor:
            total.by_tensor[name] = total.by_tensor.get(name, 0.0) + self._gram
        if self._along is not None:
            total.along_momentum[name] = total.along_momentum.get(name, 0.0) + self._along
        total.step_squared += self._squared
        self._name, self._gram, self._along, self._squared = "", np.zeros_like(self._gram), None, 0.0


def _add_blocks(total: Array, blocks: Array) -> None:
    found = native.library()
    if found is not None:
        found.crossfed_add_blocks(len(blocks), total.size, native.address(blocks), native.address(total))
        return
    for block in blocks:
        total += block
