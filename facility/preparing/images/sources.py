"""Where images come from: a folder of classes, a folder with metadata, or Parquet files. One image at a time.

A folder's images are read in the order of a digest of their names, so that a share or a first part of them holds every
class as often as the whole. Nothing outside the folder is opened: no link that leaves it, no path that does.
"""

from __future__ import annotations

import csv
import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from facility.dataset import DatasetError, SourceEntry
from facility.exchange.files.bounded import real_path
from facility.exchange.json_text import no_duplicates, parse_values
from facility.exchange.messages.manifest import sha256_of
from facility.exchange.text import number_of
from facility.preparing.labels import class_name, label_names
from facility.preparing.said_of_records import name_of, names_in
from facility.preparing.sources import unicode_name, unicode_text
from facility.preparing.tables import once_each, open_parquet, parquet_rows
from facility.preparing.walking import files_below, path_of

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
METADATA = ("metadata.csv", "metadata.jsonl")
PARQUET = ".parquet"
SPLIT_NAMES = ("train", "training", "validation", "valid", "val", "test")
MOST_METADATA_BYTES = 1 << 30
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One image as it lies in its source, not decoded."""

    name: str
    """Where it is, for messages."""
    label: str
    path: Path | None = None
    """The file; None: the bytes are here."""
    data: bytes = b""

    def read(self, most_bytes: int) -> bytes:
        """The encoded image. Raises `DatasetError` for one of more than `most_bytes`."""
        try:
            size = self.path.stat().st_size if self.path is not None else len(self.data)
            if size > most_bytes:
                raise DatasetError(f"{self.name} has {size:,} bytes, at most {most_bytes:,} are read (--most-bytes)")
            if self.path is None:
                return self.data
            with open(self.path, "rb") as file:
                return file.read(most_bytes)
        except OSError as error:
            raise DatasetError(f"{self.name} cannot be read: {error}") from None


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """The images of one input."""

    name: str
    """What the manifest calls it."""
    files: list[Picture] = field(default_factory=list)
    """Of a folder: its images, in order."""
    table: Path | None = None
    """A Parquet file."""

    def entry(self, split: str) -> SourceEntry:
        """Name, size and digest: of a folder over the digest, path and class of each image."""
        if self.table is not None:
            size = self.table.stat().st_size
            return SourceEntry(name=self.name, split=split, sha256=sha256_of(self.table), size=size)
        digest, size = hashlib.sha256(), 0
        for one in self.files:
            assert one.path is not None
            digest.update(f"{sha256_of(one.path)} {one.name} {one.label}\n".encode())
            size += one.path.stat().st_size
        return SourceEntry(name=self.name, split=split, sha256=digest.hexdigest(), size=size)

    def pictures(self, image_field: str, label_field: str) -> Iterator[Picture]:
        """The images in order. Raises `DatasetError` for a table that holds none."""
        if self.table is None:
            yield from self.files
        else:
            yield from rows_of(self.table, image_field, label_field)


def find_images(arguments: list[str], label_field: str) -> list[ImageSource]:
    """Turn command-line inputs into sources. Raises `DatasetError` for what holds no images."""
    found = []
    for argument in arguments:
        path = path_of(argument)
        if path.is_file() and path.name.lower().endswith(PARQUET):
            found.append(ImageSource(name=unicode_name(path.name), table=path))
        elif not path.is_dir():
            raise DatasetError(f"{path}: expected a folder of images or a Parquet file")
        else:
            found += in_folder(path, label_field)
    return found


def in_folder(root: Path, label_field: str) -> list[ImageSource]:
    """A folder's Parquet files, or its images as one source. Raises `DatasetError` where it holds both, or neither."""
    files = files_below(root, (*SUFFIXES, PARQUET), beside=METADATA)
    tables = [path for path in files if path.name.lower().endswith(PARQUET)]
    images = [path for path in files if not path.name.lower().endswith(PARQUET)]
    if tables and images:
        raise DatasetError(
            f"{root} holds Parquet files ({len(tables)}, such as {tables[0].relative_to(root)}) and images "
            f"({len(images)}, such as {images[0].relative_to(root)}): which of them are meant is not known; give a "
            "folder of one kind"
        )
    if tables:
        return [
            ImageSource(name=unicode_name(f"{root.name}/{table.relative_to(root).as_posix()}"), table=table)
            for table in tables
        ]
    pictures = described(root, label_field, images) or by_folder(root, images)
    return [ImageSource(name=unicode_name(root.name), files=sorted(pictures, key=mixed))]


def mixed(picture: Picture) -> bytes:
    """What a folder's images are ordered by."""
    return hashlib.blake2b(picture.name.encode(), digest_size=16).digest()


def by_folder(root: Path, images: list[Path]) -> list[Picture]:
    """The images, whose class is the name of the folder they are in. Raises `DatasetError`."""
    found, strays = [], []
    for path in images:
        if path.is_symlink():  # folders above it are none: the walk refuses them
            inside(root, path)
        relative = path.relative_to(root)
        if len(relative.parts) < 2:
            strays.append(relative.as_posix())
            continue
        label = relative.parts[0]
        if label != unicode_name(label):
            raise DatasetError(
                f"{unicode_name(str(root / label))}: the folder's name is a class, and is no UTF-8 text: rename it"
            )
        found.append(Picture(name=unicode_name(relative.as_posix()), label=label, path=path))
    if strays:
        raise DatasetError(
            f"{root} holds {strays[0]!r} beside its folders ({number_of(len(strays), 'such image')}): an image's "
            f"class is the name of its folder, or stands in {' or '.join(METADATA)}"
        )
    if not found:
        raise DatasetError(f"{root} holds no image; expected CLASS/NAME with {', '.join(SUFFIXES)}, or Parquet files")
    labels = {one.label for one in found}
    if labels <= set(SPLIT_NAMES):
        one = sorted(labels)[0]
        raise DatasetError(
            f"the folders of {root} are {', '.join(sorted(labels))}, which are splits and no classes: give "
            f"--input {root / one}, and --validation with the folder of the validation images"
        )
    return found


def described(root: Path, label_field: str, images: list[Path]) -> list[Picture]:
    """Images named in `metadata.csv` or `metadata.jsonl`; none where there is no such file. Raises `DatasetError`.

    `images`: those that are there. How many of them the file does not name is logged.
    """
    present = [root / name for name in METADATA if (root / name).is_file()]
    if not present:
        return []
    if len(present) > 1:
        raise DatasetError(f"{root} holds {' and '.join(METADATA)}: keep one of them")
    (file,) = present
    inside(root, file)
    if file.stat().st_size > MOST_METADATA_BYTES:
        raise DatasetError(f"{file} has {file.stat().st_size:,} bytes, expected at most {MOST_METADATA_BYTES:,}")
    found = []
    for place, record in records(file):
        name = record.get("file_name")
        if not isinstance(name, str) or not name:
            raise DatasetError(f"{place}: file_name is {name_of(name)}, expected the path of an image in {root}")
        path = root / unicode_text(name, "file_name", place)
        inside(root, path)
        if not path.is_file():
            raise DatasetError(f"{place}: {name!r:.200} is not a file in {root}")
        found.append(Picture(name=name, label=label_of(record.get(label_field), place, label_field), path=path))
    if not found:
        raise DatasetError(f"{file} names no image, expected a row for each")
    labels: dict[Path, str] = {}
    for one in found:
        assert one.path is not None
        if labels.setdefault(one.path, one.label) != one.label:
            raise DatasetError(
                f"{file} names {one.name!r:.200} as {name_of(labels[one.path])} and as {name_of(one.label)}; keep one "
                "label"
            )
    if unnamed := [path for path in images if path not in labels]:
        log.warning(
            "%s: %d images are not in %s and are left out, such as %s", root, len(unnamed), file.name, unnamed[0]
        )
    return found


def records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and content of each record of a metadata file."""
    try:
        with open(file, encoding="utf-8-sig", newline="" if file.suffix == ".csv" else None) as lines:
            if file.suffix == ".csv":
                for number, row in enumerate(csv.DictReader(lines), start=2):
                    yield f"{file}:{number}", row
                return
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    raw = parse_values(line, object_pairs_hook=no_duplicates)
                    yield f"{file}:{number}", raw if isinstance(raw, dict) else {}
    except (OSError, ValueError, csv.Error) as error:
        raise DatasetError(f"{file} cannot be read: {error}") from None


def inside(root: Path, path: Path) -> None:
    """Raise `DatasetError` unless the file, links followed, lies in the folder."""
    if not real_path(path).is_relative_to(real_path(root)):
        raise DatasetError(f"{path} leads out of {root}, to {real_path(path)}: only files in the folder are read")


def label_of(value: Any, place: str, label_field: str) -> str:
    """A label as text. Raises `DatasetError`."""
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise DatasetError(f"{place}: label {label_field!r} is {name_of(value)}, expected text or a whole number")
    return unicode_text(str(value), f"label {label_field!r}", place)


def rows_of(table: Path, image_field: str, label_field: str) -> Iterator[Picture]:
    """Images in a Parquet file as `datasets` writes it: a column of {bytes, path}, or of bytes; no path is opened."""
    import pyarrow

    try:
        with open_parquet(table) as file:
            columns = file.schema_arrow.names
            if missing := [name for name in (image_field, label_field) if name not in columns]:
                raise DatasetError(f"{table}: no column {missing[0]!r}; it has {names_in(columns)}")
            read = once_each([image_field, label_field], columns, str(table))
            names = label_names(file.schema_arrow.metadata or {}, label_field)
            for number, record in enumerate(parquet_rows(file, read), start=1):
                yield _picture(record, f"{table.name}: row {number}", image_field, label_field, names)
    except (pyarrow.ArrowException, OSError) as error:
        raise DatasetError(f"{table} is not a readable Parquet file: {error}") from None


def _picture(record: dict[str, Any], place: str, image_field: str, label_field: str, names: Sequence[str]) -> Picture:
    """The image of one row; `names`: of the classes, for labels that are their numbers. Raises `DatasetError`."""
    image, value = record[image_field], record[label_field]
    data = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(data, bytes):
        raise DatasetError(f"{place}: {image_field!r} holds no bytes; embed the images in the file")
    label = label_of(value, place, label_field)
    return Picture(name=place, label=class_name(label, names, place) if names else label, data=data)
