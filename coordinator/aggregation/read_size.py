"""How much the kernel reads at a time: so few elements of every source that they are still in the cache when they are
worked on, and the fewer, the more sources there are.
"""

from __future__ import annotations

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
MOST_BYTES = 3 << 20
"""Of a piece of every source: where it would be more, as with 16 updates in float32, half a piece is read."""


def elements_read(work: Work) -> int:
    """Elements read at a time from each source: whole pieces, or half of one."""
    if work.unmasking is not None:  # the fewer, the less memory; the sum of a piece stays in the cache
        return PIECE
    widest, decodes = 1.0, False
    for name, base in work.base.items():
        found, as_stored = [source[name] for source in work.sources if name in source], work.as_stored(name)
        layouts = [layout_as_stored(entry, base) if as_stored else None for entry in found]
        widest = max(widest, sum(map(_bytes_each, found, layouts)))
        encoded = (isinstance(entry, EncodedTensor) and bool(entry.fields) for entry in found)
        decodes = decodes or any(one and layout is None for one, layout in zip(encoded, layouts, strict=True))
    if widest * PIECE > MOST_BYTES and not decodes:  # what is decoded is so by whole pieces
        return PIECE // 2
    return max(PIECE, min(READ, int(READ_BYTES / widest) // PIECE * PIECE))


def _bytes_each(entry: TensorEntry, layout: native.BlockLayout | None) -> float:
    """Of one value in a buffer."""
    return ITEM_BYTES[entry.dtype] if layout is None else 1 / layout.values_a_byte
