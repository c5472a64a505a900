"""Documents in blocks whose tokens are marked: which bear loss, and where each document begins.

`joined` cuts one stream of documents into blocks, `separate` puts whole documents together into a block (best fit among
the blocks that are open; documents are cut to a block), `padded` gives each document a block of its own. A stream of
plain text under `separate` stays a stream: what a block cuts off begins the next block as a document of its own, which
`REST` distinguishes from a whole one, and what fills no block at the end is filled up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from facility.dataset import LOSS, REST, START
from facility.preparing.encoding import EncodedBatch
from facility.preparing.packing import RowWriter
from facility.preparing.sources import Document

COUNTS = ("tokens", "loss_tokens", "truncated", "dropped", "padding_tokens")
OPEN_BLOCKS = 64
"""Blocks that later documents may still fill."""


class MarkedStream:
    """One stream of documents cut into blocks; what fills no block yet waits for the next call."""

    truncated = dropped = 0

    def __init__(
        self,
        directory: Path,
        split: str,
        block_tokens: int,
        *,
        filler: int | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        """`filler`: documents are kept apart: each block begins one, if only the rest of one, and this id fills the
        last block; None: they are joined, and what fills no block is left out. `state`: of an earlier run."""
        state = state or {"rows": 0, "ids": [], "marks": [], "tokens": 0, "loss_tokens": 0}
        self._filler = filler
        self.rests_marked = filler is not None
        self.padding_tokens = 0
        self._ids = RowWriter(directory / f"{split}.npy", block_tokens, rows=state["rows"])
        self._marks = RowWriter(directory / f"{split}.marks.npy", block_tokens, "|u1", rows=state["rows"])
        self._waiting = (numpy.array(state["ids"], dtype=numpy.int32), numpy.array(state["marks"], dtype=numpy.uint8))
        self.tokens: int = state["tokens"]
        self.loss_tokens: int = state["loss_tokens"]

    def state(self) -> dict[str, Any]:
        """What a later run goes on from; what it counts is on disk."""
        self._ids.sync()
        self._marks.sync()
        ids, marks = (one.tolist() for one in self._waiting)
        counts = {"tokens": self.tokens, "loss_tokens": self.loss_tokens}
        return {"rows": self._ids.rows, "ids": ids, "marks": marks} | counts

    @property
    def blocks(self) -> int:
        return self._ids.rows

    @property
    def tail_tokens(self) -> int:
        """Tokens that wait for a block to fill."""
        return len(self._waiting[0])

    def append(self, encoded: EncodedBatch, documents: list[Document]) -> None:
        """Append the next documents' tokens; those without any loss too, as what others follow."""
        self._append(encoded.tokens, marks_of(encoded))
        self.tokens += len(encoded.tokens)

    def _append(self, ids: numpy.ndarray, marks: numpy.ndarray) -> None:
        width = self._ids.width
        ids = numpy.concatenate([self._waiting[0], ids])
        marks = numpy.concatenate([self._waiting[1], marks])
        whole = len(ids) // width * width
        if self._filler is not None:
            begins = marks[:whole:width]
            begins |= numpy.where(begins & START, 0, START | REST).astype(numpy.uint8)
        self._ids.append(ids[:whole])
        self._marks.append(marks[:whole])
        self.loss_tokens += count_predicted(marks[:whole])
        self._waiting = (ids[whole:], marks[whole:])

    def close(self) -> None:
        """Write what waits, too, where documents are kept apart: whether a document is there depends on no other."""
        if self._filler is not None and self.tail_tokens:
            self.padding_tokens = self._ids.width - self.tail_tokens
            marks = numpy.zeros(self.padding_tokens, dtype=numpy.uint8)
            marks[0] = START
            self._append(numpy.full(self.padding_tokens, self._filler, dtype=numpy.int32), marks)
        self._ids.close()
        self._marks.close()


@dataclass(kw_only=True)
class _Open:
    """A block that has room left."""

    ids: list[numpy.ndarray] = field(default_factory=list)
    marks: list[numpy.ndarray] = field(default_factory=list)
    room: int

    def state(self) -> dict[str, Any]:
        ids, marks = ([one.tolist() for one in rows] for rows in (self.ids, self.marks))
        return {"ids": ids, "marks": marks, "room": self.room}

    @classmethod
    def of(cls, state: dict[str, Any]) -> _Open:
        return cls(
            ids=[numpy.array(one, dtype=numpy.int32) for one in state["ids"]],
            marks=[numpy.array(one, dtype=numpy.uint8) for one in state["marks"]],
            room=state["room"],
        )


class WholeDocuments:
    """Whole documents in blocks; the result depends on the documents and their order only."""

    tail_tokens = 0

    def __init__(
        self,
        directory: Path,
        split: str,
        block_tokens: int,
        *,
        filler: int,
        alone: bool,
        state: dict[str, Any] | None = None,
    ) -> None:
        """`filler`: the id after a block's last document; `alone`: one document a block; `state`: of an earlier run."""
        state = state or {"rows": 0, "open": []}
        self._ids = RowWriter(directory / f"{split}.npy", block_tokens, rows=state["rows"])
        self._marks = RowWriter(directory / f"{split}.marks.npy", block_tokens, "|u1", rows=state["rows"])
        self._open = [_Open.of(one) for one in state["open"]]
        self._filler, self._most = filler, 0 if alone else OPEN_BLOCKS
        self.tokens = self.loss_tokens = self.truncated = self.dropped = self.padding_tokens = 0
        for name in COUNTS:
            setattr(self, name, state.get(name, 0))

    def state(self) -> dict[str, Any]:
        """What a later run goes on from; what it counts is on disk."""
        self._ids.sync()
        self._marks.sync()
        counts = {name: getattr(self, name) for name in COUNTS}
        return counts | {"rows": self._ids.rows, "open": [one.state() for one in self._open]}

    @property
    def blocks(self) -> int:
        return self._ids.rows

    def append(self, encoded: EncodedBatch, documents: list[Document]) -> None:
        """Append the next documents, each cut to a block; one that bears no loss then is left out."""
        marks, width, begin = marks_of(encoded), self._ids.width, 0
        for length in encoded.lengths.tolist():
            cut = slice(begin, begin + min(length, width))
            begin += length
            if not count_predicted(marks[cut]):
                self.dropped += 1
                continue
            self.truncated += length > width
            self._place(encoded.tokens[cut], marks[cut])

    def _place(self, ids: numpy.ndarray, marks: numpy.ndarray) -> None:
        fitting = [block for block in self._open if block.room >= len(ids)]
        if fitting:
            block = min(fitting, key=lambda one: one.room)
        else:
            block = _Open(room=self._ids.width)
            self._open.append(block)
        block.ids.append(ids)
        block.marks.append(marks)
        block.room -= len(ids)
        self.tokens += len(ids)
        self.loss_tokens += count_predicted(marks)
        if block.room == 0:
            self._write(block)
        elif len(self._open) > self._most:
            self._write(min(self._open, key=lambda one: one.room))

    def _write(self, block: _Open) -> None:
        self._open = [other for other in self._open if other is not block]
        if block.room:
            block.ids.append(numpy.full(block.room, self._filler, dtype=numpy.int32))
            block.marks.append(numpy.zeros(block.room, dtype=numpy.uint8))
            block.marks[-1][0] = START
            self.padding_tokens += block.room
        self._ids.append(numpy.concatenate(block.ids))
        self._marks.append(numpy.concatenate(block.marks))

    def close(self) -> None:
        """Write the open blocks too."""
        while self._open:
            self._write(self._open[0])
        self._ids.close()
        self._marks.close()


def marks_of(encoded: EncodedBatch) -> numpy.ndarray:
    """`LOSS` where the encoding says so (everywhere in plain text), `START` at each document's first token."""
    marks = numpy.full(len(encoded.tokens), LOSS, dtype=numpy.uint8) if encoded.loss is None else encoded.loss * LOSS
    starts = numpy.concatenate([[0], numpy.cumsum(encoded.lengths)])[:-1]
    marks[starts[encoded.lengths > 0]] |= START
    return marks


def count_predicted(marks: numpy.ndarray) -> int:
    """Tokens that bear loss; nothing comes before a document's first token to predict it from."""
    return int(((marks & (LOSS | START)) == LOSS).sum())
