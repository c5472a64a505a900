"""Validation documents that are in training too, recognised by content whatever files they come from.

A document's content is its text and its second text without the white space around them; the label is not part of it.
Near duplicates are not found.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

import numpy

from facility.dataset import DatasetError, SplitEntry
from facility.preparing.sources import Document

OVERLAP_SHARE = 0.01
"""Share of the validation documents that may be in training too."""


class ContentDigests:
    """64 bits of each document's digest: 8 bytes a document; among 10^8 documents a false match is one in 10^5 runs."""

    def __init__(self) -> None:
        self._digests = {"train": array("Q"), "validation": array("Q")}

    def add(self, split: str, documents: Iterable[Document]) -> None:
        self._digests[split].extend(_digest(document) for document in documents)

    def overlapping(self) -> int:
        """Number of validation documents whose content is in training."""
        train, validation = (numpy.frombuffer(self._digests[s], numpy.uint64) for s in ("train", "validation"))
        return int(numpy.isin(validation, train).sum())


def _digest(document: Document) -> int:
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
