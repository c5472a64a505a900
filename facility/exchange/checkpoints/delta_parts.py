"""Reading tensors part by part, and what both directions of a message share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.checkpoint import ITEM_BYTES, TensorEntry, read_exactly
from facility.exchange.checkpoints.codecs import PART
from facility.exchange.checkpoints.floats import STORAGE, Array, widen

FILE = "delta.safetensors"
READ = 4 * PART
"""Elements read at a time, few enough to be still in the cache when they are worked on."""
RAW = 1 << 22
"""Bytes read at a time of a tensor that is not floating point."""


@dataclass(frozen=True, kw_only=True)
class HeldTensor(TensorEntry):
    """A tensor that is in memory and not in a file; `start` means nothing, and `file` is where it would have gone."""

    values: Callable[[int, int], memoryview]
    """(first element, number of elements) -> their bytes as they would be stored."""


def read_parts(entries: list[TensorEntry], width: int = PART, piece: int = PART) -> Iterator[tuple[int, list[Array]]]:
    """The first `width` elements of each PART of several tensors of one shape, in buffers that are used again.

    `piece`: elements yielded at a time where `width` is PART; at most READ.
    """
    step = READ if width == PART else PART
    with ExitStack() as stack:
        readers = [_reader(entry, stack) for entry in entries]
        buffers = [np.empty(min(step, entry.elements), STORAGE[entry.dtype]) for entry in entries]
        for begin in range(0, entries[0].elements, step):
            count = min(step if width == PART else width, entries[0].elements - begin)
            for read, buffer in zip(readers, buffers, strict=True):
                read(begin, buffer[:count])
            for start in range(0, count, piece):
                yield begin + start, [buffer[start : min(start + piece, count)] for buffer in buffers]


def _reader(entry: TensorEntry, stack: ExitStack) -> Callable[[int, Array], None]:
    """What fills an array with the elements of a tensor from a first one on."""
    if isinstance(entry, HeldTensor):
        held = entry.values

        def copy(begin: int, buffer: Array) -> None:
            as_bytes(buffer)[:] = held(begin, len(buffer))

        return copy
    descriptor = stack.enter_context(open(entry.file, "rb", buffering=0)).fileno()

    def read(begin: int, buffer: Array) -> None:
        read_exactly(descriptor, as_bytes(buffer), entry.start + begin * buffer.itemsize, entry.file)

    return read


def write_difference(
    base: Array, base_dtype: str, update: Array, update_dtype: str, out: Array, scratch: Array
) -> float:
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


def raw_ranges(entry: TensorEntry) -> Iterator[tuple[int, memoryview]]:
    """(offset, bytes) of a tensor as stored, RAW bytes at a time."""
    if isinstance(entry, HeldTensor):
        item = ITEM_BYTES[entry.dtype]
        for offset in range(0, entry.size, RAW):
            yield offset, entry.values(offset // item, min(RAW, entry.size - offset) // item)
        return
    with open(entry.file, "rb", buffering=0) as file:
        for offset in range(0, entry.size, RAW):
            buffer = memoryview(bytearray(min(RAW, entry.size - offset)))
            read_exactly(file.fileno(), buffer, entry.start + offset, entry.file)
            yield offset, buffer


def as_bytes(array: Array) -> memoryview:
    """An array's memory as bytes, not copied."""
    return np.ascontiguousarray(array).data.cast("B") if array.size else memoryview(b"")
