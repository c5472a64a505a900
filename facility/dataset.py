"""A prepared dataset on disk, and how the trainer opens it.

    DIR/train.npy, DIR/validation.npy   int32, one row of `block_tokens` token ids per block (NumPy, memory-mapped)
    DIR/train.rows.npy, ...             classification only: int32, one row (label, length, second_start) per block
    DIR/train.marks.npy, ...            chat, preference, documents kept apart: uint8, for each id LOSS + START + REST
    DIR/train.npy, ...                  images: uint8, one row of channels x height x width values per image, and
    DIR/train.rows.npy, ...             int32, its class
    DIR/tokenizer/                      a copy of the tokenizer that made the ids
    DIR/image_processor/                images: a copy of the model's preprocessor_config.json
    DIR/dataset.json                    `DatasetManifest`, written last: a directory without it is not a dataset

`facility.prepare` writes it. It never leaves its facility. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy

from facility.exchange.errors import ConfigurationError, InputError, NewerFormat
from facility.exchange.json_values import values_in
from facility.exchange.messages.dataset_card import SPLITS
from facility.exchange.messages.manifest import sha256_of
from facility.exchange.task_words import Task
from facility.exchange.validation import parse_dataclass, validated

FORMAT = 1
NEWER = "update CrossFed here, or prepare the dataset again with this one"
NAME = "dataset.json"
TOKENIZER = "tokenizer"
IMAGE_PROCESSOR = "image_processor"
IMAGES: Literal["image-classification"] = "image-classification"
Documents = Literal["joined", "separate", "padded"]
LOSS, START, REST = 1, 2, 4
"""Marks of a token: it is to be predicted; a document (or the filling of a block) begins here; what begins here, with a
block, is the rest of the document before."""


class DatasetError(InputError):
    """A prepared dataset, or what it was to be prepared from, is not usable."""


@validated(frozen=True, kw_only=True)
class SourceEntry:
    """One file (or dataset, or folder of very many files) that the blocks were made from."""

    name: str
    """File name without its folders, or `hub:NAME`."""
    split: str
    """The split it was read for."""
    sha256: str
    """Hex digest of the file; for a `datasets` dataset its fingerprint; for a folder over its files' digests, names."""
    size: int
    """Bytes; for a `datasets` dataset its rows."""


@validated(frozen=True, kw_only=True)
class SplitEntry:
    """What one split holds."""

    blocks: int
    """Rows of `block_tokens` ids."""
    documents: int
    """Documents read into it."""
    empty_documents: int
    """Documents without any text (chat: without an answer): skipped, not counted in `documents`."""
    tokens: int
    """Tokens that the documents gave, template included."""
    tail_tokens: int
    """Tokens dropped at the end of the stream, where they fill no whole block. 0 for classification."""
    truncated_documents: int = 0
    """Documents longer than a block, cut to it (classification; chat unless its documents are joined)."""
    dropped_documents: int = 0
    """Chat: conversations in which no token bears loss: without an answer, or cut before it. Preferences: such pairs,
    and those whose answers are equal, as far as half a block holds them. Images: files that could not be decoded
    (`--skip-unreadable`), not counted in `documents`."""
    loss_tokens: int = 0
    """With marks: tokens that bear loss."""
    padding_tokens: int = 0
    """Documents apart: tokens that fill blocks after their last document."""
    rests_marked: bool = False
    """Plain text, documents apart: marks distinguish the rest of a document from one that begins with a block; not so
    in datasets made before there was `REST`."""
    duplicate_documents: int = 0
    """Documents left out since they repeat an earlier one (`--near-duplicates`), not counted in `documents`."""
    document_tokens: list[int] = field(default_factory=list)
    """Tokens of a document, template included: least, median, 95th percentile, most; empty in datasets made before
    this was counted."""
    elsewhere_documents: int = 0
    """Documents left out since another facility's signatures hold them."""
    overlapping_documents: int = 0
    """Validation only: documents whose content is in training too; 0 in datasets made before this was counted."""
    sha256: str
    """Hex digest of the `.npy` file."""
    rows_sha256: str | None = None
    """Classification of texts or images: hex digest of the `.rows.npy` file."""
    marks_sha256: str | None = None
    """With marks: hex digest of the `.marks.npy` file."""


@validated(frozen=True, kw_only=True)
class Pixels:
    """What an image is once the model's image processor has resized it."""

    channels: int
    height: int
    width: int
    rescale: float
    """Values from 0 to 255 are multiplied by this, then normalised: (value - mean) / std."""
    mean: list[float]
    """Mean of the pixel values by channel."""
    std: list[float]
    """Standard deviation of the pixel values by channel."""
    processor_sha256: str
    """Which image processor: `facility.exchange.checkpoints.image_processor.image_processor_digest`."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return self.channels, self.height, self.width

    @property
    def values(self) -> int:
        """Values of one image: channels x height x width."""
        return self.channels * self.height * self.width


@validated(frozen=True, kw_only=True)
class DatasetManifest:
    """`dataset.json`: what was prepared, from what, how."""

    task: Task
    block_tokens: int
    """Tokens per block; 1 for images, each of which counts as one."""
    vocabulary_size: int
    """Ids lie in [0, vocabulary_size); for images the number of classes."""
    tokenizer_sha256: str
    """Which tokenizer: `facility.exchange.checkpoints.tokenizer.tokenizer_digest`; of any other form: unknown; empty
    for images."""
    template: str
    """What surrounds each text, for instance "Scrivi un documento: {text}{eos}"; empty for chat."""
    chat_template_sha256: str = ""
    """Chat only: hex digest of the Jinja template; empty for plain prompts and completions."""
    documents: Documents = "joined"
    """How documents share a block: as one text, each attending to itself only, or one a block."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The rest of what decides the result: fields, caps, shares. The number of processes is not among them."""
    classes: list[str] = field(default_factory=list)
    """Classification of texts or images: the label of class 0, 1, ..."""
    pad_token_id: int | None = None
    """Classification only: what fills a row after its length."""
    pixels: Pixels | None = None
    """Images only."""
    splits: dict[str, SplitEntry]
    sources: list[SourceEntry]
    language: str = ""
    """What the facility says the text is in (BCP 47 tags); empty: it says nothing. Nothing here looks for it."""
    versions: dict[str, str] = field(default_factory=dict)
    """Version of each library that had a part in it."""
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class PreparedDataset:
    """An opened dataset: nothing is in memory until its blocks are touched."""

    directory: Path
    manifest: DatasetManifest
    _open: dict[str, numpy.memmap] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The files that are mapped, by name: a shared file system is asked for a path once, not for every batch."""

    @property
    def tokenizer_directory(self) -> Path:
        return self.directory / TOKENIZER

    def split(self, name: str) -> numpy.memmap:
        """Token ids of split `train` or `validation`: int32 of shape (blocks, block_tokens), mapped, read-only; of
        images uint8 of shape (images, channels x height x width).

        Raises `DatasetError` for an unknown split, or a file that is missing or of another shape than the manifest
        says.
        """
        entry = self._entry(name)
        if self.manifest.pixels is not None:
            return self._mapped(f"{name}.npy", (entry.blocks, self.manifest.pixels.values), "uint8")
        return self._mapped(f"{name}.npy", (entry.blocks, self.manifest.block_tokens))

    def labels(self, name: str) -> numpy.ndarray:
        """Images only: int32, the class of each. Raises `DatasetError` for another task."""
        entry = self._entry(name)
        if self.manifest.task != IMAGES:
            raise DatasetError(f"{self.directory} was prepared for {self.manifest.task}: it holds no images")
        return self._mapped(f"{name}.rows.npy", (entry.blocks, 1))[:, 0]

    def rows(self, name: str) -> numpy.memmap:
        """Classification only: int32 of shape (blocks, 3) with label, length in tokens, and where the second text
        begins (equal to the length where there is none). Raises `DatasetError` for another task."""
        entry = self._entry(name)
        if self.manifest.task != "classification":
            raise DatasetError(f"{self.directory} was prepared for {self.manifest.task}: it has no labels")
        return self._mapped(f"{name}.rows.npy", (entry.blocks, 3))

    @property
    def hides_rests(self) -> bool:
        """Plain text kept apart: true if it is unknown whether a block begins with a document or the rest of one."""
        stream = self.manifest.task == "causal-lm" and self.manifest.documents == "separate"
        return stream and not all(split.rests_marked for split in self.manifest.splits.values())

    @property
    def marked(self) -> bool:
        """True if the dataset says which tokens bear loss and where documents begin."""
        return self.manifest.task in ("chat", "preference") or self.manifest.documents != "joined"

    def marks(self, name: str) -> numpy.memmap:
        """uint8 of the ids' shape: `LOSS` and `START` of each. Raises `DatasetError` for a dataset without marks."""
        entry = self._entry(name)
        if not self.marked:
            raise DatasetError(f"{self.directory} was prepared for {self.manifest.task}, documents joined: no marks")
        shape = (entry.blocks, self.manifest.block_tokens)
        return self._mapped(f"{name}.marks.npy", shape, "uint8")

    def files(self, name: str) -> dict[str, str]:
        """Files of a split that training reads, and their sha256 in the manifest."""
        entry = self._entry(name)
        digests = {"npy": entry.sha256, "rows.npy": entry.rows_sha256, "marks.npy": entry.marks_sha256}
        return {f"{name}.{ending}": digest for ending, digest in digests.items() if digest is not None}

    def verify(self) -> None:
        """Read all files and compare them with the manifest; raises `DatasetError` naming the first that differs."""
        for name, entry in self.manifest.splits.items():
            blocks = self.split(name)
            if entry.rows_sha256 is not None:
                self._labels(name)
            if entry.marks_sha256 is not None:
                self.marks(name)
            for file, expected in self.files(name).items():
                if (found := sha256_of(self.directory / file)) != expected:
                    raise DatasetError(
                        f"{self.directory / file} has sha256 {found[:12]}..., {NAME} says {expected[:12]}...: altered; "
                        "prepare the dataset again"
                    )
            ids = self.labels(name) if self.manifest.task == IMAGES else blocks
            if len(ids) and (ids.min() < 0 or ids.max() >= self.manifest.vocabulary_size):
                raise DatasetError(
                    f"{self.directory / name}.npy holds ids outside [0, {self.manifest.vocabulary_size}): altered"
                )

    def _labels(self, name: str) -> numpy.ndarray:
        """What `.rows.npy` holds, whatever is classified."""
        return self.labels(name) if self.manifest.task == IMAGES else self.rows(name)

    def _mapped(self, name: str, shape: tuple[int, ...], dtype: str = "int32") -> numpy.memmap:
        """The file's array. What was read of it before no longer counts as memory of this process, which would grow
        with every batch of a round; it stays in the system's cache."""
        if name in self._open:
            mapping = self._open[name].base
            assert isinstance(mapping, mmap.mmap)
            mapping.madvise(mmap.MADV_DONTNEED)  # of a file: whatever views it are read from there again
        else:
            self._open[name] = _mapped(self.directory / name, shape, dtype)
        return self._open[name]

    def _entry(self, name: str) -> SplitEntry:
        if name not in self.manifest.splits:
            raise DatasetError(f"{self.directory} has no split {name!r}; it has {', '.join(self.manifest.splits)}")
        return self.manifest.splits[name]


def _mapped(file: Path, shape: tuple[int, ...], dtype: str = "int32") -> numpy.memmap:
    try:
        if not file.is_file() and file.exists():  # a named pipe would be waited for
            raise ValueError("it is not a regular file")
        array = numpy.load(file, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DatasetError(f"{file} is missing: the dataset is incomplete; prepare it again") from None
    except (OSError, ValueError, EOFError) as error:
        raise DatasetError(f"{file} is not an array that can be mapped: {error}; prepare the dataset again") from None
    if array.dtype != numpy.dtype(dtype) or array.shape != shape:
        raise DatasetError(
            f"{file} holds {array.dtype} of shape {array.shape}, {NAME} says {dtype} of shape {shape}: prepare it again"
        )
    return array


def open_dataset(path: Path | str) -> PreparedDataset:
    """Open a directory that `facility.prepare` wrote.

    Reads `dataset.json` and the headers of the arrays, not the data (`verify()` reads all). Raises `DatasetError` when
    it is missing, incomplete, malformed or of a newer format.
    """
    directory = Path(path)
    if not os.path.isdir(directory):
        raise DatasetError(f"{directory} is not a directory: expected a dataset made by `python -m facility.prepare`")
    file = directory / NAME
    try:
        raw = values_in(file)
    except FileNotFoundError:
        raise DatasetError(
            f"{directory} holds no {NAME}: not a dataset made by `python -m facility.prepare`, or an incomplete one"
        ) from None
    except (OSError, ValueError) as error:
        raise DatasetError(f"{file} cannot be read: {error}; prepare the dataset again") from None
    version = raw.get("format") if isinstance(raw, dict) else None
    if type(version) is not int:
        raise DatasetError(f"{file} is not a dataset's manifest: expected an object with an integer `format`")
    if version < 1:
        raise DatasetError(f"{file} has format {version}, expected 1 to {FORMAT}: prepare the dataset again")
    if version > FORMAT:
        raise DatasetError(f"{file} has format {version}, this version reads up to {FORMAT}: update CrossFed here")
    try:
        splits, sources = raw.pop("splits", None), raw.pop("sources", None)
        if not isinstance(splits, dict) or not isinstance(sources, list):
            raise ConfigurationError(
                f"`splits` is {splits!r:.40} and `sources` {sources!r:.40}, expected an object and a list"
            )
        entries = {
            name: parse_dataclass(SplitEntry, value, where=f"splits.{name}", update=NEWER)
            for name, value in splits.items()
        }
        origin = [parse_dataclass(SourceEntry, value, where="sources", update=NEWER) for value in sources]
        manifest = parse_dataclass(DatasetManifest, raw | {"splits": {}, "sources": []}, update=NEWER)
    except NewerFormat as error:
        raise DatasetError(f"{file}: {error}") from None
    except ConfigurationError as error:
        raise DatasetError(f"{file} is malformed: {error}") from None
    dataset = PreparedDataset(
        directory=directory, manifest=dataclasses.replace(manifest, splits=entries, sources=origin)
    )
    if manifest.block_tokens < 1 or manifest.vocabulary_size < 1 or set(entries) != set(SPLITS):
        raise DatasetError(
            f"{file} has splits {sorted(entries)}, blocks of {manifest.block_tokens} and a vocabulary of "
            f"{manifest.vocabulary_size}; expected splits {list(SPLITS)} and positive numbers"
        )
    if (manifest.pixels is not None) != (manifest.task == IMAGES) or (
        manifest.pixels and min(manifest.pixels.shape) < 1
    ):
        raise DatasetError(f"{file} is of the task {manifest.task} with pixels {manifest.pixels}: prepare it again")
    for name in entries:
        dataset.split(name)
        if manifest.task in ("classification", IMAGES):
            dataset._labels(name)
        if dataset.marked:
            dataset.marks(name)
    return dataset
