"""What differential privacy protects: the units of a prepared dataset, each with the pieces of blocks it consists of.

Adding or removing one unit changes the sum of a step by at most the clip, however many pieces the unit has: its
gradient is clipped as a whole. Imports no torch, so that `facility.probe` can count units.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from facility.dataset import LOSS, START, PreparedDataset
from facility.exchange.errors import InputError
from facility.exchange.messages.privacy import Unit

ROWS = 4096
"""Blocks whose marks are read at once."""


@dataclass(frozen=True, kw_only=True)
class Units:
    """Unit i consists of pieces[offsets[i]:offsets[i + 1]]."""

    pieces: np.ndarray
    """(block, first token, end) of each piece: int64."""
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
    pieces, stream = marked_pieces(dataset, split), dataset.manifest.task == "causal-lm"
    found = grouped(pieces, continues=stream, most=most)
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
            "told from its neighbours': prepare it with --documents separate"
            + (", or padded" if manifest.task == "chat" else "")
            + ", or set privacy.differential.unit to block, which protects one block and not a whole document"
        )
    if unit == "block" and manifest.documents == "separate":
        raise InputError(
            f"{where} keeps documents apart, so that unit document costs the same noise and protects more: set "
            "privacy.differential.unit to document"
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


def grouped(pieces: np.ndarray, *, continues: bool, most: int) -> Units:
    """Pieces as units, without those that bear no loss.

    `continues`: the blocks are cut from one stream, so that the piece at a block's beginning may go on with the one
    before it. Nothing says whether it does; both count as one document, which protects two where it does not.
    """
    begins = (pieces[:, 1] > 0) | (pieces[:, 0] == 0) if continues else np.ones(len(pieces), dtype=bool)
    number = np.cumsum(begins)[pieces[:, 3] > 0]
    kept = pieces[pieces[:, 3] > 0, :3]
    first_of = np.searchsorted(number, number)
    within = np.arange(len(kept)) - first_of
    allowed = within < most
    counts = np.unique(number[allowed], return_counts=True)[1]
    return Units(
        pieces=kept[allowed],
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        left_out=int((~allowed).sum()),
    )
