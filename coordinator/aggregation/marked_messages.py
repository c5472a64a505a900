"""Messages with a bit for each value, which the compiled code reads as they are stored instead of decoded.

Where a part's codes begin follows from the bits of the parts before it: the bits of all messages are read first and
counted at once, then the codes that belong to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coordinator.aggregation.message_blocks import adds_to, blamed, check_sizes
from coordinator.aggregation.streams import Files
from coordinator.aggregation.work import Malformed
from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.checkpoint import TensorEntry
from facility.exchange.checkpoints.codecs import PART
from facility.exchange.checkpoints.encoded import EncodedTensor, begin_of, check_selected
from facility.exchange.checkpoints.floats import Array
from facility.exchange.delta_codecs import Marks
from facility.exchange.errors import CheckpointError

PATIENCE = 1.0
"""Seconds that a thread leaves to another that has the parts before its own under way; then it counts them itself."""
RECORD: Any = np.dtype([("levels", "u8"), ("codes", "u8"), ("taken", "i8")])
"""`struct marked` of native.c."""


def marks_as_stored(entry: TensorEntry, base: TensorEntry) -> Marks | None:
    """How the compiled code reads a message as it is stored, where its values are marked; None: it does not."""
    if not isinstance(entry, EncodedTensor) or not entry.fields or (marks := entry.codec.marks) is None:
        return None
    return marks if marks.kind in native.MARKED and adds_to(entry, base) else None


@dataclass(frozen=True, kw_only=True)
class _Message:
    """One update's message of a tensor: its place in memory and in its file."""

    number: int
    """Number of the source that the message is of, counted from 1."""
    entry: EncodedTensor
    stored: TensorEntry
    """Its codes in the file."""
    bits: int
    """Address of its bits."""
    codes: memoryview
    place: int
    """Address of its codes."""


@dataclass(kw_only=True)
class Marked:
    """The messages of one codec that hold a tensor."""

    marks: Marks
    levels: Array
    """(messages, parts, levels), as stored."""
    records: Array
    """(messages, parts): what the compiled code is given of each part."""
    messages: list[_Message] = field(default_factory=list)

    @classmethod
    def for_messages(cls, marks: Marks, messages: int, elements: int) -> Marked:
        """Memory for `elements` values of each of at most `messages` messages."""
        parts = -(-elements // PART)
        levels: Array = np.zeros((messages, parts, marks.levels_a_part), np.float32)
        records: Array = np.zeros((messages, parts), RECORD)
        records["levels"] = native.address(levels) + levels.strides[0] * np.arange(messages, dtype=np.uint64)[:, None]
        records["levels"] += np.uint64(levels.strides[1]) * np.arange(parts, dtype=np.uint64)
        return cls(marks=marks, levels=levels, records=records)

    def add(self, number: int, entry: EncodedTensor, buffer: memoryview, elements: int) -> tuple[Array, int]:
        """(levels to fill, address of the records) of one more message, whose bits and codes of `elements` values will
        lie in `buffer`, the bits first.

        Raises `CheckpointError` where what is stored is not as long as its layout says.
        """
        check_sizes(entry, self.marks.bits, self.marks.levels)
        row, split, selection = len(self.messages), -(-elements // 8), entry.codec.selection
        assert selection is not None
        bits = native.address(np.frombuffer(buffer, np.uint8))
        self.messages.append(
            _Message(
                number=number,
                entry=entry,
                stored=entry.fields[selection.field],
                bits=bits,
                codes=buffer[split:],
                place=bits + split,
            )
        )
        return self.levels[row], native.address(self.records[row])

    def read_codes(self, begin: int, count: int, files: Files) -> None:
        """Read the codes of `count` values from `begin` on; bits and levels have been read. Raises `Malformed`."""
        counts = self._counts(count)
        self._check_levels(counts.shape[1])
        lengths = (counts + 1) // 2
        ends, first = np.cumsum(lengths, axis=1), begin // PART
        begins = [
            self._begin(message, first, row, begin + count) for message, row in zip(self.messages, ends, strict=True)
        ]
        sizes = ends[:, -1]
        places = np.array([one.place for one in self.messages], np.uint64)
        records = self.records[: len(places), : counts.shape[1]]
        records["codes"] = places[:, None] + (ends - lengths).astype(np.uint64)
        done = files.read_at_once(
            np.array([files.descriptor(one.stored) for one in self.messages], np.int32),
            np.array([one.stored.start + offset for one, offset in zip(self.messages, begins, strict=True)], np.int64),
            np.ascontiguousarray(sizes),
            places,
        )
        for row, message in enumerate(self.messages[done:], done):
            try:
                files.read_into(message.stored, begins[row], message.codes[: int(sizes[row])])
            except CheckpointError as error:
                raise Malformed(message.number - 1, str(error)) from None

    def _counts(self, count: int) -> Array:
        """(messages, parts): how many values are kept of each part."""
        found = native.library()
        assert found is not None
        counts: Array = np.empty((len(self.messages), -(-count // PART)), np.int64)
        bits = np.array([one.bits for one in self.messages], np.uint64)
        odd = found.crossfed_sparse_counts(len(bits), count, native.address(bits), native.address(counts))
        if odd >= 0:
            with blamed(self.messages[odd].number, self.messages[odd].entry):
                raise ValueError("bits are set past the end of the tensor")
        return counts

    def _check_levels(self, parts: int) -> None:
        try:
            self.marks.check(self.levels[: len(self.messages), :parts])
        except ValueError:
            for message, row in zip(self.messages, self.levels, strict=False):
                with blamed(message.number, message.entry):
                    self.marks.check(row[:parts])
            raise

    def _begin(self, message: _Message, part: int, ends: Array, values: int) -> int:
        """Where the codes of `part` begin, whose and whose followers' ends are `ends` more; hands it on."""
        entry = message.entry
        entry.begins.wait(part, PATIENCE)
        try:
            with blamed(message.number, entry):
                first = begin_of(entry, part)
            for number, end in enumerate(ends.tolist()):
                entry.begins.learn(part + number, first + end)
            check_selected(entry, values, first + int(ends[-1]))
        except CheckpointError as error:
            raise Malformed(message.number - 1, str(error)) from None
        return first
