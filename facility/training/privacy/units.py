"""What differential privacy protects: the units of a prepared dataset, each with the pieces of blocks it consists of.

Adding or removing one unit changes the sum of a step by at most the clip, however many pieces the unit has: its
gradient is clipped as a whole. Imports no torch, so that `facility.probe` can count units.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from facility.dataset import LOSS, REST, START, PreparedDataset
from facility.exchange.errors import InputError
from facility.exchange.messages.privacy import Unit

ROWS = 4096
"""Blocks whose marks are read at once."""


@dataclass(frozen=True, kw_only=True)
class Units:
    """Unit i consists of pieces[offsets[i]:offsets[i + 1]]."""

    pieces: np.ndarray
    """(block, first token, end) of each piece: int64; an end beyond a block's length lies in the next block."""
    offsets: np.ndarray
    left_out: int = 0
    """Pieces beyond the most that a unit may have: never trained on."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def of(self, unit: int) -> np.ndarray:
        """Pieces of a unit, as rows of `pieces`."""
        return self.pieces[self.offsets[unit] : self.offsets[unit + 1]]


def units_of(dataset: PreparedDataset, split: str, unit: Unit, *, most: int) -> Units:
    """The units of a split; `most`: pieces of a unit. Raises `InputError` where document boundaries are unknown, or
    where there is none to be trained on."""
    check_unit(dataset, unit)
    if dataset.manifest.documents == "joined" or dataset.manifest.task == "classification":
        return whole_blocks(len(dataset.split(split)), dataset.manifest.block_tokens)
    if dataset.manifest.task == "causal-lm":
        found = grouped(*stream_pieces(dataset, split), most=most)
    else:
        pieces = marked_pieces(dataset, split)
        found = grouped(pieces, np.arange(len(pieces)), most=most)
    if not len(found):
        raise InputError(
            f"{dataset.directory}: no document of the {split} split has a token that bears loss; prepare other text"
        )
    return found


def evaluated_units(units: int, most: int) -> range:
    """The validation units that are evaluated, at most `most` (0: all) of so many.

    The first ones: a unit more or less in the dataset takes at most one out and puts at most one in, so that the sum of
    their losses changes by no more than the bound of one. Evenly spread ones, as without privacy, would all be others.
    """
    return range(min(units, most or units))


def check_unit(dataset: PreparedDataset, unit: Unit) -> None:
    """Raise `InputError` where this dataset has no such units."""
    manifest, where = dataset.manifest, dataset.directory
    if manifest.task == "preference":
        raise InputError(
            f"{where} holds preferences, whose loss rests on reference figures of all pairs: differential privacy is "
            "offered for causal-lm, chat, masked-lm and classification"
        )
    joined = manifest.documents == "joined" and manifest.task != "classification"
    if unit == "document" and joined:
        raise InputError(
            f"{where} joins documents, so that a block holds parts of several and a document's gradient cannot be "
            "distinguished from its neighbours': prepare it with --documents separate"
            + (", or padded" if manifest.task == "chat" else "")
            + ", or set privacy.differential.unit to block, which protects one block and not a whole document"
        )
    if unit == "block" and manifest.documents == "separate":
        raise InputError(
            f"{where} keeps documents apart, so that unit document costs the same noise and protects more: set "
            "privacy.differential.unit to document"
        )
    if unit == "document" and dataset.hides_rests:
        raise InputError(
            f"{where} was prepared by a version that did not mark whether a block begins with a document or with the "
            "rest of one, so that a document's pieces are not known: prepare it again with --replace"
        )
    if shared := manifest.splits["validation"].overlapping_documents:
        raise InputError(
            f"{where} has {shared} documents in training and in validation: their loss would count twice; prepare it "
            "again without them"
        )


def whole_blocks(blocks: int, width: int) -> Units:
    """Every block a unit of its own."""
    pieces = np.zeros((blocks, 3), dtype=np.int64)
    pieces[:, 0], pieces[:, 2] = np.arange(blocks), width
    return Units(pieces=pieces, offsets=np.arange(blocks + 1))


def marked_pieces(dataset: PreparedDataset, split: str) -> np.ndarray:
    """(block, first, end, bears loss) of every piece between two marks of a beginning."""
    marks, width = dataset.marks(split), dataset.manifest.block_tokens
    found = []
    for row in range(0, len(marks), ROWS):
        piece = np.asarray(marks[row : row + ROWS])
        begins = piece & START != 0
        begins[:, 0] = True
        starts = np.flatnonzero(begins)
        ends = np.append(starts[1:], piece.size)
        borne = np.concatenate([[0], np.cumsum((piece & (LOSS | START)).ravel() == LOSS)])
        first = starts % width
        found.append(np.stack([row + starts // width, first, first + ends - starts, borne[ends] > borne[starts]], 1))
    return np.concatenate(found) if found else np.zeros((0, 4), dtype=np.int64)


def stream_pieces(dataset: PreparedDataset, split: str) -> tuple[np.ndarray, np.ndarray]:
    """(block, first, end, bears loss) of every piece of documents cut from one stream, and each piece's document.

    A document is put together across blocks, then cut at multiples of a block's length from its own beginning: what its
    pieces are depends on no other document. So `end` may lie in the next block.
    """
    marks, width = dataset.marks(split), dataset.manifest.block_tokens
    rows = range(0, len(marks), ROWS)
    found = [row * width + np.flatnonzero(begins_document(np.asarray(marks[row : row + ROWS]))) for row in rows]
    documents = np.concatenate([*found, np.zeros(0, dtype=np.int64)])
    lengths = np.diff(np.append(documents, marks.size))
    counts = -(-lengths // width)
    number = np.repeat(np.arange(len(documents)), counts)
    within = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = documents[number] + within * width
    ends = np.minimum(starts + width, np.append(documents, marks.size)[number + 1])
    borne = np.zeros(len(starts), dtype=bool)
    for row in rows:
        bears = bears_loss(np.asarray(marks[row : row + ROWS]))
        low, high = row * width, row * width + bears.size
        inside = slice(np.searchsorted(ends, low, "right"), np.searchsorted(starts, high))
        before = np.concatenate([[0], np.cumsum(bears)])
        first, last = (np.clip(one[inside], low, high) - low for one in (starts + 1, ends))
        borne[inside] |= before[last] > before[np.minimum(first, last)]
    return np.stack([starts // width, starts % width, starts % width + ends - starts, borne], 1), number


def begins_document(marks: np.ndarray) -> np.ndarray:
    """Where a document begins, or filling, and not the rest of a document: bool, flat."""
    return ((marks & (START | REST)) == START).ravel()


def bears_loss(marks: np.ndarray) -> np.ndarray:
    """Where a token of a stream is to be predicted, should there be one before it: bool, flat."""
    return ((marks & LOSS) != 0).ravel() & ~begins_document(marks)


def grouped(pieces: np.ndarray, document: np.ndarray, *, most: int) -> Units:
    """Pieces as units, one a `document`, without those that bear no loss."""
    number, kept = document[pieces[:, 3] > 0], pieces[pieces[:, 3] > 0, :3]
    first_of = np.searchsorted(number, number)
    within = np.arange(len(kept)) - first_of
    allowed = within < most
    counts = np.unique(number[allowed], return_counts=True)[1]
    return Units(
        pieces=kept[allowed],
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        left_out=int((~allowed).sum()),
    )
