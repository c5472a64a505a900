"""Messages in blocks of whole numbers, which the compiled code reads as they are stored instead of decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coordinator.aggregation.work import Malformed
from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.checkpoint import TensorEntry
from facility.exchange.checkpoints.encoded import EncodedTensor
from facility.exchange.checkpoints.floats import Array
from facility.exchange.delta_codecs import Blocks
from facility.exchange.errors import CheckpointError

STORED_SCALES: Mapping[int, Any] = {2: np.uint16, 4: np.float32}
"""numpy dtype of scales by their bytes."""


def layout_as_stored(entry: TensorEntry, base: TensorEntry) -> native.BlockLayout | None:
    """How the compiled code reads the values of a message as they are stored; None: they are decoded."""
    if not isinstance(entry, EncodedTensor) or not entry.fields or (blocks := entry.codec.blocks) is None:
        return None
    layout = native.BLOCKS.get(blocks.kind)
    return layout if layout is not None and adds_to(entry, base) else None


def check_sizes(entry: EncodedTensor, blocks: Blocks, layout: native.BlockLayout) -> None:
    """Raise `CheckpointError` where what is stored is not as long as the layout says."""
    sizes = {
        blocks.numbers: -(-entry.elements // layout.values_a_byte),
        blocks.scales: -(-entry.elements // layout.block) * layout.scale_bytes,
    }
    for suffix, size in sizes.items():
        found = entry.fields[suffix]
        if found.size != size:
            raise CheckpointError(f"{found.file}: {found.name!r} has {found.size} bytes, expected {size}")


def adds_to(entry: EncodedTensor, base: TensorEntry) -> bool:
    """Whether the values are float32 sums of a difference and the base as it is read."""
    return entry.dtype == "F32" and entry.reference.dtype == base.dtype and base.dtype in native.KINDS


@dataclass(kw_only=True)
class Scales:
    """The scales of all messages of one layout, which are checked at once."""

    blocks: Blocks
    layout: native.BlockLayout
    rows: Array
    """(messages, blocks), as stored."""
    messages: list[tuple[int, TensorEntry]] = field(default_factory=list)
    """Number of the source and tensor of each row that is used."""

    @classmethod
    def for_messages(cls, blocks: Blocks, layout: native.BlockLayout, messages: int, elements: int) -> Scales:
        """Memory for `elements` values of each of at most `messages` messages."""
        rows: Array = np.empty((messages, -(-elements // layout.block)), STORED_SCALES[layout.scale_bytes])
        return cls(blocks=blocks, layout=layout, rows=rows)

    def add(self, number: int, entry: TensorEntry) -> Array:
        """The row of one more message."""
        self.messages.append((number, entry))
        return self.rows[len(self.messages) - 1]

    def check(self, count: int) -> None:
        """Raise `Malformed` where a scale of the first `count` values is none that an encoder writes."""
        rows = self.rows[: len(self.messages), : -(-count // self.layout.block)]
        try:
            self.blocks.check(rows)
        except ValueError:
            for (number, entry), row in zip(self.messages, rows, strict=True):
                self._check_one(number, entry, row)
            raise

    def _check_one(self, number: int, entry: TensorEntry, row: Array) -> None:
        try:
            self.blocks.check(row)
        except ValueError as error:
            raise Malformed(number - 1, f"{entry.file}: tensor {entry.name!r} is malformed: {error}") from None
