"""How much the kernel reads at a time: so few elements of every source that they are still in the cache when they are
worked on, and the fewer, the more sources there are.
"""

from __future__ import annotations

from coordinator.aggregation.marked_messages import marks_as_stored
from coordinator.aggregation.message_blocks import layout_as_stored
from coordinator.aggregation.streams import PIECE
from coordinator.aggregation.work import Work
from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.checkpoint import ITEM_BYTES, TensorEntry
from facility.exchange.checkpoints.encoded import EncodedTensor

READ = 4 * PIECE
"""Elements read at a time from each source, at most."""
READ_BYTES = 3 << 19
"""Bytes that one thread reads at a time, of all sources together (a piece of each at least)."""
MOST_BYTES = 5 << 19
"""Of a piece of every source: where it would be more, as with 16 updates in float32, half a piece is read."""

MARKED_BYTES = 5 / 8
"""Of a marked value at most: a bit, and half a byte of code."""


def elements_read(work: Work) -> int:
    """Elements read at a time from each source: whole pieces, or half of one."""
    if work.unmasking is not None:  # the fewer, the less memory; the sum of a piece stays in the cache
        return PIECE
    products = 8 * len(work.plain) ** 2 / native.RUN
    widest, whole = 1.0, False
    for name, base in work.base.items():
        as_stored = work.as_stored(name)
        found = [_of(source[name], base, as_stored=as_stored) for source in work.sources if name in source]
        widest = max(widest, products + sum(size for size, _ in found))
        whole = whole or any(by_parts for _, by_parts in found)
    if widest * PIECE > MOST_BYTES and not whole:
        return PIECE // 2
    return max(PIECE, min(READ, int(READ_BYTES / widest) // PIECE * PIECE))


def _of(entry: TensorEntry, base: TensorEntry, *, as_stored: bool) -> tuple[float, bool]:
    """(bytes of one value in a buffer, whether it is read by whole parts: where it is decoded, and where its values are
    marked)."""
    if as_stored and (layout := layout_as_stored(entry, base)) is not None:
        return layout.item_bytes / layout.values, False
    if as_stored and marks_as_stored(entry, base) is not None:
        return MARKED_BYTES, True
    return ITEM_BYTES[entry.dtype], isinstance(entry, EncodedTensor) and bool(entry.fields)
