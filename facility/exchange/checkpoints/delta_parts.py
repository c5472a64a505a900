"""Reading tensors part by part, and what both directions of a message share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np

from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.checkpoint import TensorEntry, read_exactly
from facility.exchange.checkpoints.codecs import PART
from facility.exchange.checkpoints.floats import STORAGE, Array, widen

FILE = "delta.safetensors"
READ = 4 * PART
"""Elements read at a time, few enough to be still in the cache when they are worked on."""


def parts(entries: list[TensorEntry], width: int = PART, piece: int = PART) -> Iterator[tuple[int, list[Array]]]:
    """The first `width` elements of each PART of several tensors of one shape, in buffers that are used again.

    `piece`: elements yielded at a time where `width` is PART; at most READ.
    """
    step = READ if width == PART else PART
    with ExitStack() as stack:
        files = [stack.enter_context(open(entry.file, "rb", buffering=0)) for entry in entries]
        buffers = [np.empty(min(step, entry.elements), STORAGE[entry.dtype]) for entry in entries]
        for begin in range(0, entries[0].elements, step):
            count = min(step if width == PART else width, entries[0].elements - begin)
            for file, entry, buffer in zip(files, entries, buffers, strict=True):
                read_exactly(file.fileno(), as_bytes(buffer[:count]), entry.start + begin * buffer.itemsize, entry.file)
            for start in range(0, count, piece):
                yield begin + start, [buffer[start : min(start + piece, count)] for buffer in buffers]


def difference(base: Array, base_dtype: str, update: Array, update_dtype: str, out: Array, scratch: Array) -> float:
    """Writes update - base, of values as stored, in float32; returns its sum of squares."""
    found = native.library()
    if found is not None and base_dtype in native.KINDS and update_dtype in native.KINDS:
        return float(
            found.crossfed_difference(
                len(out),
                native.address(update),
                native.KINDS[update_dtype],
                native.address(base),
                native.KINDS[base_dtype],
                native.address(out),
            )
        )
    widen(update, update_dtype, out)
    widen(base, base_dtype, scratch)
    np.subtract(out, scratch, out=out)
    return float(np.vdot(out, out))


def raw(entry: TensorEntry) -> Iterator[tuple[int, memoryview]]:
    with open(entry.file, "rb", buffering=0) as file:
        for offset in range(0, entry.size, 1 << 22):
            buffer = memoryview(bytearray(min(1 << 22, entry.size - offset)))
            read_exactly(file.fileno(), buffer, entry.start + offset, entry.file)
            yield offset, buffer


def as_bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B") if array.size else memoryview(b"")
