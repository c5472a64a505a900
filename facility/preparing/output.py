"""The directory of a dataset: recognised where the same request made it, or put in its place, whole, at the end."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from facility.dataset import NAME, SPLITS, DatasetError, PreparedDataset, SourceEntry, open_dataset
from facility.exchange.files import present
from facility.exchange.files.durable import new_directory
from facility.exchange.files.owners import account_name, not_ours
from facility.preparing.resuming import clear_after
from facility.preparing.sources import Source, unicode_name
from facility.preparing.walking import path_of

log = logging.getLogger(__name__)

MOST_ENTRIES = 10_000
"""Of one input in the manifest: a million would be 170 MB, which every rank of every round reads."""


@dataclass(frozen=True, kw_only=True)
class AnyRequest:
    """What every dataset is asked for with, of texts or of images: its documents."""

    inputs: list[str]
    """Files, folders, saved datasets or hub names for training; of images, folders or Parquet files."""
    out: Path
    """Directory to make."""
    classes: list[str] = field(default_factory=list)
    """The classes in the order of the model's outputs; empty: those of the training documents."""
    validation: list[str] = field(default_factory=list)
    """Inputs of the validation split; empty: a share of the training inputs."""
    validation_share: float = 0.05
    """Share of the documents that is held out where `validation` is empty: evenly spread, or, of documents that are
    kept apart, chosen by each one's content, so that the share is nearly this."""
    train_samples: int = 0
    """Most documents to take; 0: all."""
    validation_samples: int = 0
    """Most documents to take; 0: all."""
    processes: int = 1
    """At work at once; the output is the same."""
    replace: bool = False
    """Make `out` again when it holds a dataset made otherwise."""
    allow_overlap: bool = False
    """Accept any number of validation documents that are in training too."""
    streaming: bool = False
    """Read hub datasets as they download, keeping nothing."""

    def _check(self, **least: int) -> None:
        """Raise `DatasetError` for what is out of bounds; `least`: the smallest value of further numbers."""
        counts = {"train_samples": 0, "validation_samples": 0, "processes": 1}
        for name, smallest in (counts | least).items():
            if (value := getattr(self, name)) < smallest:
                raise DatasetError(f"{name} is {value}, expected {smallest} or more")
        if not 0 < self.validation_share < 1:
            raise DatasetError(f"validation_share is {self.validation_share}, expected more than 0 and less than 1")
        if len(set(self.classes)) != len(self.classes) or len(self.classes) == 1:
            raise DatasetError(f"--classes names {self.classes[:10]}: expected two classes or more, each once")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A dataset and whether it was there already."""

    dataset: PreparedDataset
    reused: bool


@contextmanager
def publish_directory(out: Path) -> Iterator[Path]:
    """A temporary directory that becomes `out` at the end; an `out` that exists is there, whole, until that moment.

    A link is followed: what it leads to is made or replaced. The directory is its owner's alone; one that was there,
    were it empty, hands on its group and mode.
    """
    out = Path(os.path.realpath(out))
    before = out.stat() if present.is_dir(out) else None
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
    if not present.exists(out):
        with new_directory(out, mode=0o700) as directory:
            _open_as(before, directory)
            yield directory
        return
    newer, older = _beside(out)
    for left in (newer, older):  # by a run that was killed around the two moves below
        if left.is_dir():
            shutil.rmtree(left)
    with new_directory(newer, mode=0o700) as directory:
        _open_as(before, directory)
        yield directory
    os.rename(out, older)
    os.rename(newer, out)
    shutil.rmtree(older)


def _open_as(before: os.stat_result | None, directory: Path) -> None:
    """Give the group of `before` what it had there; nobody more where that group cannot be given."""
    if before is None:
        return
    if before.st_uid != os.geteuid():  # whoever made it first would say who reads the documents
        log.warning("the folder was made by %s: the data set is its owner's alone", account_name(before.st_uid))
        return
    with suppress(OSError):
        os.chown(directory, -1, before.st_gid)
        os.chmod(directory, stat.S_IMODE(before.st_mode) | stat.S_IRWXU)


def clear_after_kill(out: Path) -> None:
    """Remove what a run left that was killed once `out` was in its place."""
    clear_after(out, _beside(Path(os.path.realpath(out)))[1])


def finish_replacement(out: Path) -> None:
    """Where a kill came between the two moves of `publish_directory`, make the second: what is to be `out` is whole.

    Only where no other process replaces `out`, so under its lock (`part_of`).
    """
    out = Path(os.path.realpath(out))
    newer, older = _beside(out)
    if not present.exists(out) and newer.is_dir() and older.is_dir() and not not_ours(newer):
        os.rename(newer, out)
        shutil.rmtree(older)


def _beside(out: Path) -> tuple[Path, Path]:
    """Where what replaces `out` waits, and where what it replaces goes."""
    return out.with_name(f".{out.name}.new"), out.with_name(f".{out.name}.old")


def in_few(
    arguments: Sequence[str], split: str, sources: Sequence[Source], entries: Sequence[SourceEntry]
) -> list[SourceEntry]:
    """The entries of a split, those of an input of more than `MOST_ENTRIES` files as one: every rank reads them all.

    `sources`: of that split, in the order of its entries.
    """
    of_split = [entry for entry in entries if entry.split == split]
    found = []
    for number, pairs in itertools.groupby(zip(sources, of_split, strict=True), key=lambda pair: pair[0].argument):
        held = [entry for _, entry in pairs]
        if len(held) > MOST_ENTRIES:
            name = unicode_name(Path(os.path.realpath(path_of(arguments[number]))).name)
            digest = hashlib.sha256()
            for one in held:
                digest.update(f"{one.sha256} {one.name}\n".encode())
            size = sum(one.size for one in held)
            name = f"{name} ({len(held)} files)"
            held = [SourceEntry(name=name, split=split, sha256=digest.hexdigest(), size=size)]
        found += held
    return found


def check_out(out: Path, inputs: Sequence[str] = ()) -> None:
    """Raise `DatasetError` for a directory that cannot be made under its name, or one that the next run would read.

    `inputs`: as they are given, of which those that are folders are read whole.
    """
    if out.name in ("", ".."):
        raise DatasetError(f"--out is {str(out)!r}, expected the name of a directory to make, such as prepared/it")
    target = Path(os.path.realpath(out))
    for folder in (path_of(argument) for argument in inputs):
        root = Path(os.path.realpath(folder))
        if folder.is_dir() and target.is_relative_to(root):
            if not any(part.startswith(".") for part in target.relative_to(root).parts):
                raise DatasetError(
                    f"--out {out} lies in the input {folder}, all of which is read: its JSON files would be taken for "
                    "text the next time; choose another place"
                )


def check_apart(entries: Sequence[SourceEntry]) -> None:
    """Raise `DatasetError` where a source is given for training and for validation."""
    train, validation = ({entry.sha256 for entry in entries if entry.split == split} for split in SPLITS)
    if both := train & validation:
        names = sorted({entry.name for entry in entries if entry.sha256 in both})
        raise DatasetError(f"{', '.join(names)}: the same content is given for training and for validation")


def recognise_dataset(
    request: AnyRequest,
    wanted: dict[str, Any],
    also: Callable[[PreparedDataset], list[str]] = lambda _: [],
) -> PreparedDataset | None:
    """The dataset at `out` if the same request made it; None if replaceable, or if there is none; else an error naming
    the differences. `also`: what differs that the manifest does not say."""
    if not present.exists(request.out) or (request.out.is_dir() and not any(request.out.iterdir())):
        return None
    if not (request.out / NAME).is_file():
        raise DatasetError(f"{request.out} exists and is not a prepared dataset: choose another --out")
    try:
        found = open_dataset(request.out)
    except DatasetError as error:
        if request.replace:
            return None
        raise DatasetError(f"{error}; --replace makes it again") from None
    # A streamed dataset has no fingerprint that says what it holds: it is never recognised.
    differing = [name for name, value in wanted.items() if getattr(found.manifest, name) != value]
    if request.streaming and any(not entry.size for entry in wanted["sources"]):
        differing.append("sources (streamed: not known until they are read)")
    differing += also(found)
    if not differing:
        return found
    if request.replace:
        return None
    raise DatasetError(
        f"{request.out} holds a dataset prepared otherwise (differing: {', '.join(differing)}); --replace makes it "
        "again"
    )
