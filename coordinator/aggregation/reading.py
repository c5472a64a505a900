"""One tensor of every source, read part by part: with one call for all of them where there is compiled code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from coordinator.aggregation.streams import STORED, Files
from coordinator.aggregation.work import Malformed
from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.checkpoint import ITEM_BYTES, TensorEntry
from facility.exchange.checkpoints.encoded import EncodedTensor, stored_of
from facility.exchange.checkpoints.floats import Array
from facility.exchange.errors import CheckpointError


class TensorReader:
    """Reads the same elements of a tensor from every source that has it, each into its buffer."""

    def __init__(
        self, name: str, sources: Sequence[Mapping[str, TensorEntry]], files: Files, buffers: Sequence[memoryview]
    ) -> None:
        """`sources`: the base first; `buffers`: one for each source."""
        self.name, self._files, self._buffers = name, files, buffers
        entries = [source.get(name) for source in sources]
        self._encoded = [(number, entry) for number, entry in enumerate(entries) if isinstance(entry, EncodedTensor)]
        self.places = [native.address(np.frombuffer(buffer, np.uint8)) for buffer in buffers]
        """Addresses of the buffers, where the elements that are read begin."""
        self._stored = [
            (number, entry)
            for number, entry in enumerate(entries)
            if entry is not None and not isinstance(entry, EncodedTensor)
        ]
        self._arrays = {
            number: np.frombuffer(buffers[number][: _whole(buffers[number], entry)], STORED[entry.dtype])
            for number, entry in self._stored
        }
        self._descriptors = np.array([files.descriptor(entry) for _, entry in self._stored], np.int32)
        self._starts = np.array([entry.start for _, entry in self._stored], np.int64)
        self._items = np.array([ITEM_BYTES[entry.dtype] for _, entry in self._stored], np.int64)
        self._bytes_each = int(self._items.sum())
        self._into = np.array([self.places[number] for number, _ in self._stored], np.uint64)

    def read(self, begin: int, count: int) -> list[Array | None]:
        """`count` elements from `begin` on, as arrays that live in the buffers; None where a source has no such tensor.

        Raises `Malformed`.
        """
        done = self._read_at_once(begin, count)
        for number, entry in self._stored[done:]:
            self._files.read(entry, begin, count, self._buffers[number])
        found: list[Array | None] = [None] * len(self._buffers)
        for number, array in self._arrays.items():
            found[number] = array[:count]
        for number, encoded in self._encoded:
            base = found[0]
            assert base is not None
            try:
                found[number] = self._files.decode(encoded, begin, base, self._buffers[number])
            except CheckpointError as error:
                raise Malformed(number - 1, str(error)) from None
        return found

    def bytes_of(self, count: int) -> int:
        """Bytes in the files of `count` elements of all sources; of encoded ones on average."""
        return self._bytes_each * count + sum(
            sum(one.size for one in stored_of(entry)) * count // max(1, entry.elements) for _, entry in self._encoded
        )

    def _read_at_once(self, begin: int, count: int) -> int:
        """How many stored tensors were read, from the first on; none where what is read is hashed one by one."""
        found = native.library()
        if found is None or self._files.hashes:
            return 0
        arrays = (self._descriptors, self._starts + self._items * begin, self._items * count, self._into)
        return int(found.crossfed_read(len(self._stored), *map(native.address, arrays)))


def _whole(buffer: memoryview, entry: TensorEntry) -> int:
    """Bytes of a buffer that hold whole elements."""
    item = ITEM_BYTES[entry.dtype]
    return len(buffer) // item * item
