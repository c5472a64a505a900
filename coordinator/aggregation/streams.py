"""Reading the same span of one tensor from many checkpoints, into buffers that are used again and again.

Nothing is memory-mapped: mapped pages would count against the process and grow with the model.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.checkpoint import ITEM_BYTES, TensorEntry, expect_tensors, read_exactly
from facility.exchange.checkpoints.encoded import EncodedTensor, add_difference, stored_of
from facility.exchange.checkpoints.floats import STORAGE, Array, widen
from facility.exchange.checkpoints.spans import PIECE, SPAN
from facility.exchange.files.streamed_digest import StreamedDigest
from facility.exchange.masking.streams import DTYPES, UNSIGNED

HASHERS = 4
"""Threads that make digests of what is read."""
STORED = STORAGE | {DTYPES[bits]: kind for bits, kind in UNSIGNED.items()}
"""numpy dtype of what is read: floating point, or the whole numbers of masked updates."""


@dataclass(frozen=True)
class Span:
    """A part of one tensor: elements `start` to `start + count`."""

    name: str
    start: int
    count: int


def spans_of(entries: dict[str, TensorEntry]) -> list[Span]:
    """All tensors cut into spans, in the order of their bytes on disk."""
    ordered = sorted(entries.items(), key=lambda item: (item[1].file.name, item[1].start))
    return [
        Span(name, start, min(SPAN, entry.elements - start))
        for name, entry in ordered
        for start in range(0, entry.elements, SPAN)
    ]


class Files:
    """Open files by path, shared by threads: every read names its offset.

    `hashed`: files to hash as they are read, by threads of their own while the reader works on what it has read; it
    calls `settle` before it reads into the same buffers again.
    """

    def __init__(self, hashed: Mapping[Path, StreamedDigest] | None = None) -> None:
        self._descriptors: dict[Path, int] = {}
        self._hashed = hashed or {}
        self._hashers = ThreadPoolExecutor(min(HASHERS, os.cpu_count() or 1)) if self._hashed else None
        self._under_way = threading.local()

    def open(self, entries: Iterable[TensorEntry]) -> None:
        """The files of these tensors, which are all that is read of them."""
        stored = [one for entry in entries for one in stored_of(entry)]
        for entry in stored:
            if entry.file not in self._descriptors:
                self._descriptors[entry.file] = os.open(entry.file, os.O_RDONLY)
        expect_tensors(self._hashed, stored)

    def read(self, entry: TensorEntry, start: int, count: int, buffer: memoryview) -> Array:
        """Elements of a tensor into `buffer`, as an array of the storage dtype that lives in it."""
        item = ITEM_BYTES[entry.dtype]
        view = buffer[: count * item]
        self.read_into(entry, start * item, view)
        return np.frombuffer(view, STORED[entry.dtype])

    def decode(self, entry: EncodedTensor, start: int, base: Array, buffer: memoryview) -> Array:
        """Elements of an encoded tensor from `start` on; `base`: the same elements of its reference, as stored."""
        values = np.frombuffer(buffer[: len(base) * ITEM_BYTES[entry.dtype]], STORED[entry.dtype])
        widen(base, entry.reference.dtype, values)
        add_difference(entry, start, values, self.read_into)
        return values

    @property
    def hashes(self) -> bool:
        """Whether some of what is read is hashed."""
        return self._hashers is not None

    def descriptor(self, entry: TensorEntry) -> int:
        """Descriptor of the open file that holds a tensor."""
        return self._descriptors[entry.file]

    def read_into(self, entry: TensorEntry, offset: int, view: memoryview) -> None:
        """Bytes of a stored tensor from byte `offset` within it on, which are hashed until `settle`."""
        read_exactly(self._descriptors[entry.file], view, entry.start + offset, entry.file)
        if self._hashers is not None and (digest := self._hashed.get(entry.file)) is not None:
            feeding = self._hashers.submit(digest.feed, entry.start + offset, view)
            self._under_way.__dict__.setdefault("futures", []).append(feeding)

    def read_at_once(self, descriptors: Array, offsets: Array, sizes: Array, places: Array) -> int:
        """Fill memory at `places` with `sizes` bytes from `offsets` on of as many files, in one call.

        All are contiguous: int32, int64, int64, uint64. Returns how many are full, from the first on; none where what
        is read is hashed one by one.
        """
        found = native.library()
        if found is None or self.hashes:
            return 0
        return int(found.crossfed_read(len(sizes), *map(native.address, (descriptors, offsets, sizes, places))))

    def settle(self) -> None:
        """Wait until what this thread has read is hashed."""
        futures: list[Future[None]] = self._under_way.__dict__.pop("futures", [])
        for future in futures:
            future.result()

    def will_need(self, entry: TensorEntry, start: int, count: int) -> None:
        """Tell the kernel to read ahead, so that the disk works while the arithmetic does."""
        for one in stored_of(entry):  # of a message, as much as of the values
            begin, end = (one.size * place // max(1, entry.elements) for place in (start, start + count))
            os.posix_fadvise(self._descriptors[one.file], one.start + begin, end - begin, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        if self._hashers is not None:
            self._hashers.shutdown()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pieces(count: int, size: int = PIECE) -> Iterator[slice]:
    """`count` elements cut into pieces."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
