"""One tensor of every source, read part by part: with one call for all of them where there is compiled code.

Messages in blocks with scales, or with a bit for each value, lie in their buffers as they are stored where the
compiled code works on them, which makes their values as it needs them. Other messages are decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.aggregation.marked_messages import Marked, marks_as_stored
from coordinator.aggregation.message_blocks import Blocked, adds_to, check_sizes, layout_as_stored
from coordinator.aggregation.streams import STORED, Files
from coordinator.aggregation.work import Malformed
from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.checkpoint import ITEM_BYTES, TensorEntry
from facility.exchange.checkpoints.codecs import PART
from facility.exchange.checkpoints.encoded import EncodedTensor, stored_of
from facility.exchange.checkpoints.floats import Array
from facility.exchange.delta_codecs import Marks
from facility.exchange.errors import CheckpointError

WIDEST = 8
"""Bytes of an element of the widest dtype: a buffer has as many for each element that is read at a time."""


@dataclass(frozen=True, kw_only=True)
class _Stream:
    """A stored tensor that is read into one place."""

    source: int
    entry: TensorEntry
    values: int
    """Of the tensor as it is worked on, that one stored element stands for."""
    item: int
    """Bytes of a stored element."""
    buffer: memoryview


class TensorReader:
    """Reads the same elements of a tensor from every source that has it, each into its buffer."""

    def __init__(
        self,
        name: str,
        sources: Sequence[Mapping[str, TensorEntry]],
        files: Files,
        buffers: Sequence[memoryview],
        *,
        as_stored: bool = False,
    ) -> None:
        """`sources`: the base first; `buffers`: one for each source, WIDEST bytes for each element of a part.

        `as_stored`: messages that the compiled code reads as they are stored are not decoded. Raises `Malformed`.
        """
        self.name, self._files, self._buffers = name, files, buffers
        self._entries = [source.get(name) for source in sources]
        self.places = [native.address(np.frombuffer(buffer, np.uint8)) for buffer in buffers]
        """Addresses of the buffers, where the elements that are read begin."""
        self.dtypes = ["" if entry is None else entry.dtype for entry in self._entries]
        """What lies there: a dtype, or how a message is stored (`native.BLOCKS`, `native.MARKED`)."""
        self._streams: list[_Stream] = []
        self._arrays: dict[int, Array] = {}
        """Each buffer that holds what is stored."""
        self._decoded: list[tuple[int, EncodedTensor]] = []
        self._still: list[int] = []
        """Messages in which this tensor is the base's."""
        self._blocked: dict[str, Blocked] = {}
        self._marked: dict[str, Marked] = {}
        self._scale_places = [0] * len(buffers)
        for number, entry in enumerate(self._entries):
            if entry is not None:
                self._plan(number, entry, as_stored=as_stored)
        self._units = [self._unit(number) for number in range(len(buffers))]
        self._descriptors = np.array([files.descriptor(one.entry) for one in self._streams], np.int32)
        self._starts = np.array([one.entry.start for one in self._streams], np.int64)
        self._stored = np.array([one.entry.size for one in self._streams], np.int64)
        self._values = np.array([one.values for one in self._streams], np.int64)
        self._items = np.array([one.item for one in self._streams], np.int64)
        into = [native.address(np.frombuffer(one.buffer, np.uint8)) for one in self._streams]
        self._into = np.array(into, np.uint64)

    def read(self, begin: int, count: int) -> list[Array | None]:
        """`count` elements from `begin` on, as arrays that live in the buffers; None where a source has no such tensor.

        Of messages as they are stored, `begin` begins a block or part and the arrays are of bytes. Raises `Malformed`.
        """
        offsets = begin // self._values * self._items
        sizes = np.minimum(-(-count // self._values) * self._items, self._stored - offsets)
        done = self._files.read_at_once(self._descriptors, self._starts + offsets, sizes, self._into)
        for stream, offset, size in zip(self._streams[done:], offsets[done:], sizes[done:], strict=True):
            self._read_one(stream, int(offset), stream.buffer[: int(size)])
        for blocked in self._blocked.values():
            blocked.check(count)
        for marked in self._marked.values():
            marked.read_codes(begin, count, self._files)
        found: list[Array | None] = [None] * len(self._buffers)
        for number, array in self._arrays.items():
            found[number] = array[:count]
        base = found[0]
        for number in self._still:
            found[number] = base
        for number, encoded in self._decoded:
            assert base is not None
            try:
                found[number] = self._files.decode(encoded, begin, base, self._buffers[number])
            except CheckpointError as error:
                raise Malformed(number - 1, str(error)) from None
        return found

    def addresses(self, start: int, sources: int) -> tuple[list[int], list[int]]:
        """Where element `start` of a part lies in the first sources, and its scale, which it is the first of, or 0."""
        places, scales = [], []
        for (place, values, item), (scale, block, scale_bytes) in self._units[:sources]:
            places.append(place + start // values * item)
            scales.append(scale + start // block * scale_bytes)
        return places, scales

    def bytes_of(self, count: int) -> int:
        """Bytes in the files of `count` elements of all sources; of encoded ones on average."""
        return sum(
            one.size * count // max(1, entry.elements)
            for entry in self._entries
            if entry is not None
            for one in stored_of(entry)
        )

    def _plan(self, number: int, entry: TensorEntry, *, as_stored: bool) -> None:
        """What is read of one source, and where to."""
        base, buffer = self._entries[0], self._buffers[number]
        assert base is not None
        if not isinstance(entry, EncodedTensor):
            item = ITEM_BYTES[entry.dtype]
            self._streams.append(_Stream(source=number, entry=entry, values=1, item=item, buffer=buffer))
            self._arrays[number] = np.frombuffer(buffer[: len(buffer) // item * item], STORED[entry.dtype])
            return
        if as_stored and (layout := layout_as_stored(entry, base)) is not None:
            self._plan_blocks(number, entry, layout)
        elif as_stored and (marks := marks_as_stored(entry, base)) is not None:
            self._plan_marked(number, entry, marks)
        elif as_stored and not entry.fields and adds_to(entry, base):
            self._still.append(number)
            self.places[number], self.dtypes[number] = self.places[0], base.dtype
        else:
            self._decoded.append((number, entry))

    def _plan_blocks(self, number: int, entry: EncodedTensor, layout: native.BlockLayout) -> None:
        """Numbers go into the source's buffer, scales beside those of the other messages."""
        blocks, buffer = entry.codec.blocks, self._buffers[number]
        assert blocks is not None
        try:
            check_sizes(entry, blocks.numbers, blocks.scales)
        except CheckpointError as error:
            raise Malformed(number - 1, str(error)) from None
        if blocks.kind not in self._blocked:
            made = Blocked.for_messages(blocks, layout, len(self._buffers), len(buffer) // WIDEST)
            self._blocked[blocks.kind] = made
        self._arrays[number] = np.frombuffer(buffer, np.uint8)
        row = self._blocked[blocks.kind].add(number, entry, self._arrays[number])
        self.dtypes[number], self._scale_places[number] = blocks.kind, native.address(row)
        for suffix, values, item, into in (
            (blocks.numbers, layout.values, layout.item_bytes, buffer),
            (blocks.scales, layout.block, layout.scale_bytes, row.data.cast("B")),
        ):
            stored = entry.fields[suffix]
            self._streams.append(_Stream(source=number, entry=stored, values=values, item=item, buffer=into))

    def _plan_marked(self, number: int, entry: EncodedTensor, marks: Marks) -> None:
        """Bits go into the source's buffer, and their codes after them when the bits are known; levels beside those of
        the other messages."""
        buffer = self._buffers[number]
        elements = len(buffer) // WIDEST
        if marks.kind not in self._marked:
            self._marked[marks.kind] = Marked.for_messages(marks, len(self._buffers), elements)
        try:
            levels, self._scale_places[number] = self._marked[marks.kind].add(number, entry, buffer, elements)
        except CheckpointError as error:
            raise Malformed(number - 1, str(error)) from None
        self.dtypes[number], self._arrays[number] = marks.kind, np.frombuffer(buffer, np.uint8)
        bits, level = entry.fields[marks.bits], entry.fields[marks.levels]
        item = 4 * marks.levels_a_part
        self._streams.append(_Stream(source=number, entry=bits, values=8, item=1, buffer=buffer))
        into = levels.data.cast("B")
        self._streams.append(_Stream(source=number, entry=level, values=PART, item=item, buffer=into))

    def _unit(self, number: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """(address, values of an element, its bytes) of what lies in a source's buffer and of its scales."""
        place, dtype = self.places[number], self.dtypes[number]
        if (layout := (native.BLOCKS | native.MARKED).get(dtype)) is not None:
            scales = self._scale_places[number], layout.block, layout.scale_bytes
            return (place, layout.values, layout.item_bytes), scales
        return (place, 1, ITEM_BYTES.get(dtype, 0)), (0, 1, 0)

    def _read_one(self, stream: _Stream, offset: int, view: memoryview) -> None:
        try:
            self._files.read_into(stream.entry, offset, view)
        except CheckpointError as error:
            if isinstance(self._entries[stream.source], EncodedTensor):
                raise Malformed(stream.source - 1, str(error)) from None
            raise
