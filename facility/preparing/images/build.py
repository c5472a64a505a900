"""One request to prepare images, recognised if it was carried out before."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import logging
import math
import shutil
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy

from facility.dataset import (
    IMAGE_PROCESSOR,
    IMAGES,
    NAME,
    SPLITS,
    DatasetError,
    DatasetManifest,
    SplitEntry,
    open_dataset,
)
from facility.exchange.checkpoints.image_processor import FILE
from facility.exchange.files.durable import write_json
from facility.exchange.messages.manifest import sha256_of
from facility.preparing.images.decode import MOST_PIXELS, Decoder, ImageLimits
from facility.preparing.images.sources import ImageSource, Picture, find_images
from facility.preparing.output import (
    AnyRequest,
    Prepared,
    check_apart,
    check_out,
    clear_after_kill,
    finish_replacement,
    publish_directory,
    recognise_dataset,
)
from facility.preparing.overlap import check_overlap
from facility.preparing.packing import RowWriter
from facility.preparing.reading import Progress
from facility.preparing.resuming import part_of
from facility.preparing.rows import class_names
from facility.preparing.said_of_records import name_of

LIBRARIES = ("pillow", "transformers", "numpy")
TOGETHER = 64
"""Images that are decoded before they are written."""
MOST_NAMED = 20
"""Images that could not be decoded, named one by one."""
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ImageRequest(AnyRequest):
    """What `python -m facility.prepare --task image-classification` was asked for."""

    processor: Path
    """Directory of the image processor, or of a model that carries one."""
    image_field: str = "image"
    """Column of the images in Parquet files."""
    label_field: str = "label"
    """Column or metadata field of the class."""
    limits: ImageLimits = dataclasses.field(default_factory=ImageLimits)
    skip_unreadable: bool = False
    """Leave out images that cannot be decoded, and count them."""

    def __post_init__(self) -> None:
        self._check()
        for name, value in (("most_bytes", self.limits.bytes), ("most_pixels", self.limits.pixels)):
            if value < 1:
                raise DatasetError(f"{name} is {value}, expected 1 or more")
        if self.limits.pixels > MOST_PIXELS:
            raise DatasetError(f"most_pixels is {self.limits.pixels:,}, expected at most {MOST_PIXELS:,}")

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the result beside what the manifest has fields for."""
        return {
            "image_field": self.image_field,
            "label_field": self.label_field,
            "classes": list(self.classes),
            "validation_share": None if self.validation else self.validation_share,
            "train_samples": self.train_samples,
            "validation_samples": self.validation_samples,
            "skip_unreadable": self.skip_unreadable,
            "most_bytes": self.limits.bytes,
            "most_pixels": self.limits.pixels,
        }


def prepare_images(request: ImageRequest, *, progress: Progress | None = None) -> Prepared:
    """Make the dataset, or recognise it. Nothing is left behind on an error. Raises `DatasetError`."""
    check_out(request.out)
    decoder = Decoder(request.processor, request.limits)
    sources = {
        "train": find_images(request.inputs, request.label_field),
        "validation": find_images(request.validation, request.label_field),
    }
    entries = [source.entry(split) for split in SPLITS for source in sources[split]]
    check_apart(entries)
    wanted: dict[str, Any] = {
        "task": IMAGES,
        "block_tokens": 1,
        "tokenizer_sha256": "",
        "template": "",
        "settings": request.settings,
        "pixels": decoder.pixels,
        "sources": entries,
    }
    if (found := _there(request, wanted)) is not None:
        clear_after_kill(request.out)
        return found
    with part_of(request.out, {}, known=False) as part:  # nothing is gone on from: it holds the lock
        finish_replacement(request.out)
        if (found := _there(request, wanted)) is not None:  # made meanwhile, by a process that ended
            return found
        with publish_directory(request.out) as directory:
            writing = Writing(request, decoder, directory)
            writing.write(sources, progress or (lambda *_: None))
            parts = writing.close()
            (directory / IMAGE_PROCESSOR).mkdir()
            shutil.copyfile(request.processor / FILE, directory / IMAGE_PROCESSOR / FILE)
            versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
            manifest = DatasetManifest(
                **wanted, vocabulary_size=len(parts["classes"]), documents="joined", **parts, versions=versions
            )
            write_json(directory / NAME, dataclasses.asdict(manifest))
            part.turn.check()
    return Prepared(dataset=open_dataset(request.out), reused=False)


def _there(request: ImageRequest, wanted: dict[str, Any]) -> Prepared | None:
    """The dataset at `out`, where the same request made it. Raises `DatasetError` where another one did."""
    found = recognise_dataset(request, wanted)
    if found is not None and not request.allow_overlap:
        check_overlap(found.manifest.splits["validation"])
    return None if found is None else Prepared(dataset=found, reused=True)


class Writing:
    """Writes both splits: values, classes, counts."""

    def __init__(self, request: ImageRequest, decoder: Decoder, directory: Path) -> None:
        self.request, self.decoder, self.directory = request, decoder, directory
        self.values = {s: RowWriter(directory / f"{s}.npy", decoder.pixels.values, "|u1") for s in SPLITS}
        self.labels: dict[str, list[str]] = {split: [] for split in SPLITS}
        self.digests = {split: array("Q") for split in SPLITS}
        self.unreadable = dict.fromkeys(SPLITS, 0)

    def write(self, sources: dict[str, list[ImageSource]], progress: Progress) -> None:
        """Decode and write every image; on several threads, since Pillow decodes without Python's lock."""
        with ThreadPoolExecutor(self.request.processes) as pool:
            for pairs in together(self._assigned(sources, progress), TOGETHER):
                for (split, picture), values in zip(pairs, pool.map(self._decoded, pairs), strict=True):
                    if values is None:
                        self.unreadable[split] += 1
                        continue
                    self.values[split].append(values)
                    self.labels[split].append(picture.label)
                    digest = hashlib.blake2b(values.tobytes(), digest_size=8).digest()
                    self.digests[split].append(int.from_bytes(digest, "little"))

    def _assigned(self, sources: dict[str, list[ImageSource]], progress: Progress) -> Iterator[tuple[str, Picture]]:
        """Each image with its split, up to the caps."""
        request = self.request
        caps = {"train": request.train_samples, "validation": request.validation_samples}
        shared, seen = not request.validation, 0
        given = dict.fromkeys(SPLITS, 0)
        pending = [(split, source) for split in SPLITS for source in sources[split]]
        for number, (origin, source) in enumerate(pending):
            for picture in source.pictures(request.image_field, request.label_field):
                progress(source.name, number / len(pending), seen)
                split = "validation" if shared and held_out(seen, request.validation_share) else origin
                seen += 1
                if caps[split] and given[split] >= caps[split]:
                    continue
                given[split] += 1
                yield split, picture
        progress("", 1.0, seen)

    def _decoded(self, pair: tuple[str, Picture]) -> numpy.ndarray | None:
        """The image's values; None for one that is left out. Raises `DatasetError`."""
        _, picture = pair
        try:
            if self.request.classes and picture.label not in self.request.classes:
                found = name_of(picture.label)
                raise WrongClass(f"{picture.name} is of the class {found}, which --classes does not name")
            return self.decoder.decode(picture.read(self.request.limits.bytes), picture.name)
        except WrongClass:
            raise
        except DatasetError as error:
            if not self.request.skip_unreadable:
                raise DatasetError(f"{error}; remove it, or leave such images out by --skip-unreadable") from None
            if sum(self.unreadable.values()) < MOST_NAMED:
                log.warning("left out: %s", error)
            return None

    def close(self) -> dict[str, Any]:
        """Number the classes, write them; returns the manifest's fields that only now are known."""
        found = [dict.fromkeys(self.labels[split]) for split in SPLITS]
        classes = self.request.classes or class_names(found)
        numbers = {name: number for number, name in enumerate(classes)}
        splits = {}
        for split in SPLITS:
            self.values[split].close()
            if not self.labels[split]:
                raise DatasetError(f"{split}: no image was read; give more, or a larger --validation-share")
            rows = RowWriter(self.directory / f"{split}.rows.npy", 1)
            rows.append(numpy.array([numbers[label] for label in self.labels[split]], numpy.int32))
            rows.close()
            splits[split] = self._entry(split)
        if not self.request.allow_overlap:
            check_overlap(splits["validation"])
        return {"classes": classes, "splits": splits}

    def _entry(self, split: str) -> SplitEntry:
        images = len(self.labels[split])
        train, own = (numpy.frombuffer(self.digests[s], numpy.uint64) for s in ("train", split))
        return SplitEntry(
            blocks=images,
            documents=images,
            empty_documents=0,
            tokens=images,
            tail_tokens=0,
            dropped_documents=self.unreadable[split],
            overlapping_documents=int(numpy.isin(own, train).sum()) if split == "validation" else 0,
            sha256=sha256_of(self.directory / f"{split}.npy"),
            rows_sha256=sha256_of(self.directory / f"{split}.rows.npy"),
        )


class WrongClass(DatasetError):
    """An image whose class is not among those that were given."""


def held_out(index: int, share: float) -> bool:
    """Whether image `index` is among the evenly spread share for validation."""
    return math.floor((index + 1) * share) > math.floor(index * share)


def together(items: Iterator[T], count: int) -> Iterator[list[T]]:
    """The items in lists of `count`."""
    while found := list(islice(items, count)):
        yield found
