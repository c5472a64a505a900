"""Pairs of answers, one pair a block: the one that was chosen, then the one that was rejected, then filling.

Both begin with the prompt. Each is a document of its own: it attends to itself only and its positions start at 0.
A pair whose answers are one and the same has no gradient under any loss of preferences, and is left out.
"""

from __future__ import annotations

from pathlib import Path

import numpy

from facility.dataset import LOSS, START
from facility.preparing.encoding import EncodedBatch
from facility.preparing.marked import count_predicted, marks_of
from facility.preparing.packing import RowWriter
from facility.preparing.sources import Document


class AnswerPairs:
    """Writes a split of pairs; the encoding holds two documents for each."""

    tail_tokens = 0
    why_dropped = "bear no loss, or have two equal answers,"
    """Why documents count as `dropped`, for messages."""

    def __init__(self, directory: Path, split: str, block_tokens: int, *, filler: int) -> None:
        self._ids = RowWriter(directory / f"{split}.npy", block_tokens)
        self._marks = RowWriter(directory / f"{split}.marks.npy", block_tokens, "|u1")
        self._filler = filler
        self.tokens = self.loss_tokens = self.truncated = self.dropped = self.padding_tokens = 0

    @property
    def blocks(self) -> int:
        return self._ids.rows

    def append(self, encoded: EncodedBatch, documents: list[Document]) -> None:
        """Append the next pairs, each answer cut to half a block; pairs that then bear no loss or are equal are not."""
        marks, ends = marks_of(encoded), numpy.cumsum(encoded.lengths).tolist()
        half, begins = self._ids.width // 2, [0, *ends]
        for number in range(0, len(ends), 2):
            cuts = [slice(begins[i], min(ends[i], begins[i] + half)) for i in (number, number + 1)]
            chosen, rejected = (encoded.tokens[cut] for cut in cuts)
            if not all(count_predicted(marks[cut]) for cut in cuts) or numpy.array_equal(chosen, rejected):
                self.dropped += 1
                continue
            self.truncated += any(ends[i] - begins[i] > half for i in (number, number + 1))
            self._write([chosen, rejected], [marks[cut] for cut in cuts])

    def _write(self, ids: list[numpy.ndarray], marks: list[numpy.ndarray]) -> None:
        held = sum(map(len, ids))
        room = self._ids.width - held
        filling = numpy.zeros(room, dtype=numpy.uint8)
        filling[:1] = START
        self._ids.append(numpy.concatenate([*ids, numpy.full(room, self._filler, dtype=numpy.int32)]))
        self._marks.append(numpy.concatenate([*marks, filling]))
        self.tokens += held
        self.padding_tokens += room
        self.loss_tokens += int(sum((one & LOSS > 0).sum() for one in marks))

    def close(self) -> None:
        self._ids.close()
        self._marks.close()
