"""Messages in blocks with scales, which the compiled code reads as they are stored instead of decoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coordinator.aggregation.work import Malformed
from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.checkpoint import ITEM_BYTES, TensorEntry
from facility.exchange.checkpoints.encoded import EncodedTensor
from facility.exchange.checkpoints.floats import Array
from facility.exchange.delta_codecs import Blocks
from facility.exchange.errors import CheckpointError

STORED_SCALES: Mapping[str, tuple[Any, int]] = {
    "INT8": (np.float32, 1),
    "INT4": (np.uint16, 1),
    "PLACED": (np.uint16, 2),
}
"""numpy dtype of scales by the kind of message, and how many belong to a block."""


def layout_as_stored(entry: TensorEntry, base: TensorEntry) -> native.BlockLayout | None:
    """How the compiled code reads the values of a message as they are stored; None: they are decoded."""
    if not isinstance(entry, EncodedTensor) or not entry.fields or (blocks := entry.codec.blocks) is None:
        return None
    layout = native.BLOCKS.get(blocks.kind)
    return layout if layout is not None and adds_to(entry, base) else None


def check_sizes(entry: EncodedTensor, *suffixes: str) -> None:
    """Raise `CheckpointError` where a field of these is not as long as the codec says."""
    sizes = {suffix: length * ITEM_BYTES[dtype] for suffix, dtype, length in entry.codec.fields(entry.elements, 0)}
    for suffix in suffixes:
        found, size = entry.fields[suffix], sizes[suffix]
        if found.size != size:
            raise CheckpointError(f"{found.file}: {found.name!r} has {found.size} bytes, expected {size}")


def adds_to(entry: EncodedTensor, base: TensorEntry) -> bool:
    """Whether the values are float32 sums of a difference and the base as it is read."""
    return entry.dtype == "F32" and entry.reference.dtype == base.dtype and base.dtype in native.KINDS


@dataclass(frozen=True, kw_only=True)
class _Message:
    """One update's message of a tensor."""

    number: int
    """Number of the source that the message is of, counted from 1."""
    entry: TensorEntry
    numbers: Array
    """The buffer that they are read into, bytes."""


@dataclass(kw_only=True)
class Blocked:
    """The messages of one layout that hold a tensor: their scales lie side by side, to be checked at once."""

    blocks: Blocks
    layout: native.BlockLayout
    rows: Array
    """(messages, scales), as stored."""
    messages: list[_Message] = field(default_factory=list)
    """Of each row that is used."""

    @classmethod
    def for_messages(cls, blocks: Blocks, layout: native.BlockLayout, messages: int, elements: int) -> Blocked:
        """Memory for the scales of `elements` values of each of at most `messages` messages."""
        dtype, each = STORED_SCALES[blocks.kind]
        rows: Array = np.empty((messages, -(-elements // layout.block) * each), dtype)
        return cls(blocks=blocks, layout=layout, rows=rows)

    def add(self, number: int, entry: TensorEntry, numbers: Array) -> Array:
        """The row of one more message, whose numbers will lie in `numbers`."""
        self.messages.append(_Message(number=number, entry=entry, numbers=numbers))
        return self.rows[len(self.messages) - 1]

    def check(self, count: int) -> None:
        """Raise `Malformed` where what was read of `count` values is nothing that an encoder writes."""
        _, each = STORED_SCALES[self.blocks.kind]
        rows = self.rows[: len(self.messages), : -(-count // self.layout.block) * each]
        try:
            self.blocks.check(rows)
        except ValueError:
            for message, row in zip(self.messages, rows, strict=True):
                with blamed(message.number, message.entry):
                    self.blocks.check(row)
            raise
        if self.blocks.check_numbers is not None:
            for message in self.messages:
                with blamed(message.number, message.entry):
                    self.blocks.check_numbers(message.numbers, count)


@contextmanager
def blamed(number: int, entry: TensorEntry) -> Iterator[None]:
    """Raise `Malformed` of source `number` for a `ValueError` about its tensor."""
    try:
        yield
    except ValueError as error:
        raise Malformed(number - 1, f"{entry.file}: tensor {entry.name!r} is malformed: {error}") from None
