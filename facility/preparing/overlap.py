"""Validation documents that are in training too, recognised by content whatever files they come from.

A document's content is its text and its second text without the white space around them; the label is not part of it.
Near duplicates are not found.
"""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy

from facility.dataset import DatasetError, SplitEntry
from facility.preparing.sources import Document

PIECE_BYTES = 8_000_000
"""Digests of training documents that are looked at at once."""
OVERLAP_SHARE = 0.01
"""Share of the validation documents that may be in training too."""


class ContentDigests:
    """64 bits of each document's digest; among 10^8 documents a false match is one in 10^5 runs.

    Those of validation documents stay in memory, 8 bytes each; those of training documents go to a temporary file.
    """

    def __init__(self, scratch: Path | None = None) -> None:
        """`scratch`: where the temporary file goes; None: where the system keeps such."""
        self._validation = array("Q")
        self._train: BinaryIO = tempfile.TemporaryFile(dir=scratch)

    def add(self, split: str, documents: Iterable[Document]) -> None:
        digests = array("Q", (digest_of(document) for document in documents))
        if split == "validation":
            self._validation.extend(digests)
        else:
            self._train.write(digests.tobytes())

    def overlapping(self) -> int:
        """Number of validation documents whose content is in training."""
        held, counts = numpy.unique(numpy.frombuffer(self._validation, numpy.uint64), return_counts=True)
        found = numpy.zeros(len(held), dtype=bool)
        self._train.seek(0)
        while len(held) and (piece := self._train.read(PIECE_BYTES)):
            digests = numpy.sort(numpy.frombuffer(piece, numpy.uint64))
            places = numpy.searchsorted(held, digests)
            places[places == len(held)] = 0
            found[places[held[places] == digests]] = True
        return int(counts[found].sum())

    def close(self) -> None:
        """The temporary file is gone."""
        self._train.close()


def digest_of(document: Document) -> int:
    """64 bits of the digest of a document's content."""
    content = f"{document.text.strip()}\0{document.pair.strip()}".encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def check_overlap(validation: SplitEntry) -> None:
    """Raises `DatasetError` where more than `OVERLAP_SHARE` of the validation documents are in training too."""
    if validation.overlapping_documents > OVERLAP_SHARE * validation.documents:
        raise DatasetError(
            f"validation: {validation.overlapping_documents:,} of {validation.documents:,} documents are in training "
            f"too, at most {OVERLAP_SHARE:.0%} may be: its loss would say how well they are remembered; remove the "
            "duplicates from the sources, or give --allow-overlap"
        )
