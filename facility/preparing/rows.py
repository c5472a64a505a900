"""Labelled documents as padded rows, one document a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy

from facility.dataset import DatasetError
from facility.preparing.encoding import EncodedBatch
from facility.preparing.packing import RowWriter
from facility.preparing.said_of_records import first_of, name_of
from facility.preparing.sources import Document

MOST_DIGITS = 400
"""Of labels that are ordered as numbers."""
MOST_NAMED = 5
"""Labels in a message."""


def pad_token_id(tokenizer: Any, directory: Path) -> int:
    """The id that fills rows; a tokenizer without one fills with its end token (the lengths distinguish them)."""
    for value in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if value is not None:
            return int(value)
    raise DatasetError(
        f"the tokenizer in {directory} has neither a pad nor an eos token to fill rows with; set one in "
        "tokenizer_config.json"
    )


def class_names(
    splits: list[dict[str, None]], named: list[str] | None = None, declared: list[str] | None = None
) -> list[str]:
    """The classes `named`, else `declared`, of which some may be missing here; else those of the training split.

    These are ordered by value where all are numbers, else by name. `declared`: by all sources, in the same order.
    Raises `DatasetError` when a document has a class that is not named, or another split one that training never saw.
    """
    if named:
        if surplus := sorted({label for labels in splits for label in labels} - set(named)):
            raise DatasetError(
                f"documents have the labels {_few(surplus)}, which --classes does not name: {_few(named)}"
            )
        return named
    if declared and len(declared) > 1:
        return declared
    train, *others = splits
    numeric = all(name.removeprefix("-").isdecimal() and len(name) <= MOST_DIGITS for name in train)
    names = sorted(train, key=lambda name: (int(name) if numeric else 0, name))
    if surplus := sorted({name for other in others for name in other} - set(train)):
        raise DatasetError(
            f"validation holds the labels {_few(surplus)}, which training does not; it has {_few(names)}"
        )
    if len(names) < 2:
        raise DatasetError(f"training holds the labels {_few(names)}: expected at least two")
    return names


def _few(labels: list[str]) -> str:
    """The first labels, and how many more there are: a field that was taken for the label may hold documents."""
    return first_of([*map(name_of, labels)], MOST_NAMED) or "(none)"


class LabelledRows:
    """Write `<split>.npy` (padded ids) and `<split>.rows.npy` (label, length, second_start)."""

    def __init__(self, directory: Path, split: str, block_tokens: int, pad: int) -> None:
        self._width, self._pad = block_tokens, pad
        self._ids = RowWriter(directory / f"{split}.npy", block_tokens)
        self._rows = RowWriter(directory / f"{split}.rows.npy", 3)
        self._found: list[numpy.ndarray] = []
        self.labels: dict[str, None] = {}
        """Labels in the order in which they were met."""
        self._number: dict[str, int] = {}
        self.tokens = self.truncated = 0
        self.tail_tokens = 0

    @property
    def blocks(self) -> int:
        return self._ids.rows

    def append(self, encoded: EncodedBatch, documents: list[Document]) -> None:
        """Append the next documents, one row each."""
        ids = numpy.full((len(documents), self._width), self._pad, dtype=numpy.int32)
        ids[numpy.arange(self._width) < encoded.lengths[:, None]] = encoded.tokens
        self._ids.append(ids)
        for document in documents:
            self.labels.setdefault(document.label)
            self._number.setdefault(document.label, len(self._number))
        labels = [self._number[document.label] for document in documents]
        self._found.append(numpy.stack([labels, encoded.lengths, encoded.seconds], axis=1).astype(numpy.int32))
        self.tokens += len(encoded.tokens)
        self.truncated += encoded.truncated

    def close(self, classes: list[str]) -> None:
        """Number the labels by `classes` and write them."""
        order = numpy.array([classes.index(label) for label in self.labels], dtype=numpy.int32)
        for found in self._found:
            found[:, 0] = order[found[:, 0]]
            self._rows.append(found)
        self._ids.close()
        self._rows.close()
