"""Where documents come from: JSONL, text, Parquet and Arrow files, saved or hub datasets. One document at a time.

A bad line or record is an error that names the file and the place; nothing is skipped silently.
"""

from __future__ import annotations

import dataclasses
import logging
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from facility.dataset import DatasetError
from facility.exchange.errors import first_line
from facility.exchange.files import present
from facility.exchange.hub import offline_if_silent
from facility.exchange.json_text import no_duplicates, parse_values
from facility.preparing.conversations import (
    SURROGATE,
    check_depth,
    columns_of,
    conversation_of,
    preference_of,
    without_absent,
)
from facility.preparing.labels import check_stream, class_name, declared_names, opened_arrow
from facility.preparing.lines import PACKED, lines_of
from facility.preparing.said_of_records import kind_of, name_of, names_in
from facility.preparing.tables import batch_rows, once_each, open_parquet, parquet_rows
from facility.preparing.walking import files_below, path_of

HUB = "hub:"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
JSON_LINES = tuple(kind + packed for kind in (".jsonl", ".ndjson", ".json") for packed in ("", *PACKED))
TEXT = (".txt", ".text", ".md", *(f".txt{packed}" for packed in PACKED))
PARQUET, ARROW = (".parquet",), (".arrow",)
KINDS = JSON_LINES + TEXT + PARQUET + ARROW
EXPECTED = (
    f"a name ending in {', '.join(('.jsonl', '.ndjson', '.json', *TEXT[:3], *PARQUET, *ARROW))}, or packed in "
    + (f"{', '.join(PACKED)} (JSON lines, .txt)")
)
CARDS = ("readme.md", "license.md", "readme.txt", "license.txt")
"""What a data set's folder says of itself, beside files of records."""
log = logging.getLogger(__name__)
TextUnit = Literal["line", "paragraph", "file"]


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Names of the fields that are read from every record."""

    text: str = "text"
    pair: str | None = None
    """Second text (classification)."""
    label: str | None = None
    """Class (classification)."""
    unit: TextUnit = "line"
    """What a document is in a file of plain text."""
    numbered: bool = False
    """Classes that a table declares by names are called by their numbers."""
    chat: bool = False
    """Records are conversations, read from the fields of `facility.preparing.conversations`."""
    pairs: bool = False
    """Each with an answer that was chosen and one that was rejected."""

    @property
    def names(self) -> list[str]:
        return [name for name in (self.text, self.pair, self.label) if name is not None]

    def columns(self, available: list[str], place: str) -> list[str]:
        """The columns of a table that are read. Raises `DatasetError` where one is missing, or there twice."""
        if self.chat:
            return once_each(columns_of(available), available, place)
        if missing := [name for name in self.names if name not in available]:
            raise DatasetError(f"{place}: no field {missing[0]!r}; it has {names_in(available)}")
        return once_each(self.names, available, place)


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document."""

    text: str
    """A conversation: as `facility.preparing.conversations` writes it."""
    pair: str = ""
    label: str = ""
    done: float
    """Share of its source that is read once this document is, in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file, or one dataset of the `datasets` library."""

    kind: Literal["jsonl", "text", "parquet", "arrow", "dataset"]
    name: str
    """What the manifest calls it."""
    path: Path | None = None
    dataset: Any = None
    """An opened `datasets.Dataset` (or a streamed one)."""
    argument: int = 0
    """Which of the inputs, from 0, it belongs to."""

    @property
    def size(self) -> int:
        """Bytes of a file, rows of a dataset; 0 if unknown."""
        if self.path is not None:
            return self.path.stat().st_size
        return len(self.dataset) if hasattr(self.dataset, "__len__") else 0


def find_sources(arguments: list[str], *, split: str, streaming: bool = False) -> list[Source]:
    """Turn command-line inputs into sources, in the order given; a folder's files come sorted by path.

    Each is a file, a folder of such files, a `save_to_disk` dataset, or a hub name (`hub:NAME`, or plain `ORG/NAME`).
    """
    return [
        dataclasses.replace(source, argument=number)
        for number, argument in enumerate(arguments)
        for source in _sources_of(argument, split, streaming)
    ]


def _sources_of(argument: str, split: str, streaming: bool) -> list[Source]:
    """The sources of one input."""
    path = path_of(argument)
    if argument.startswith(HUB):
        return [_hub(argument.removeprefix(HUB), split, streaming)]
    if present.is_file(path):
        return [_file(path, path.name)]
    if present.is_file(path / "dataset_dict.json") or present.is_file(path / "dataset_info.json"):
        return [_saved(path, split)]
    if present.is_dir(path):
        files = without_cards(path, files_below(path, KINDS))
        if not files:
            raise DatasetError(f"{path} holds no file that can be read; expected {EXPECTED}")
        return [_file(file, file.relative_to(path).as_posix()) for file in files]
    if HUB_NAME.fullmatch(argument) and not present.exists(path.parent):
        return [_hub(argument, split, streaming)]
    raise DatasetError(f"{path}: no such file or directory (a dataset of the hub is written {HUB}NAME)")


def without_cards(root: Path, files: list[Path]) -> list[Path]:
    """The files, but of a folder that holds records not its README.md or LICENSE.txt, which are logged."""
    if all(_kind(path) == "text" for path in files):
        return files
    held = [path for path in files if path.name.lower() not in CARDS]
    if cards := len(files) - len(held):
        log.warning("%s holds records: %d files such as README.md are about them, and are left out", root, cards)
    return held


def class_names_of(source: Source, fields: Fields) -> list[str]:
    """Names of the classes that a source declares in their order; none: its labels are the names."""
    if fields.label is None or fields.numbered:
        return []
    return declared_names(source.kind, source.path, source.dataset, fields.label)


def read_documents(source: Source, fields: Fields) -> Iterator[Document]:
    """The documents of one source, in order. Raises `DatasetError` at the first record that is not as expected."""
    names = class_names_of(source, fields)
    for number, document in enumerate(_read(source, fields), start=1):
        if names:
            label = class_name(document.label, names, f"{source.name}: row {number}")
            yield dataclasses.replace(document, label=label)
        else:
            yield document


def _read(source: Source, fields: Fields) -> Iterator[Document]:
    """The documents as they lie there."""
    if source.kind == "dataset":
        yield from _read_dataset(source, fields)
        return
    assert source.path is not None
    reader = {"jsonl": _read_json_lines, "text": _read_text, "parquet": _read_parquet, "arrow": _read_arrow}[
        source.kind
    ]
    try:
        yield from reader(source.path, fields)
    except UnicodeDecodeError as error:
        raise DatasetError(f"{source.path} is not UTF-8 text: {error}; convert it first") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DatasetError(f"{source.path} cannot be read: {error}") from None


def _kind(path: Path) -> Literal["jsonl", "text", "parquet", "arrow"] | None:
    name = path.name.lower()
    if name.endswith(JSON_LINES):
        return "jsonl"
    if name.endswith(TEXT):
        return "text"
    if name.endswith(ARROW):
        return "arrow"
    return "parquet" if name.endswith(PARQUET) else None


def _file(path: Path, name: str) -> Source:
    kind = _kind(path)
    if kind is None:
        raise DatasetError(f"{path} is of no known kind; expected {EXPECTED}")
    return Source(kind=kind, name=unicode_name(name), path=path)


def _saved(path: Path, split: str) -> Source:
    from datasets import DatasetDict, load_from_disk

    try:
        loaded = load_from_disk(str(path))
    except Exception as error:  # the library raises many kinds for a damaged folder
        raise DatasetError(f"{path} is not a readable save_to_disk dataset: {error}") from None
    if isinstance(loaded, DatasetDict):
        if split not in loaded:
            raise DatasetError(
                f"{path} has the splits {', '.join(loaded)}, not {split!r}; rename one of them, or give the file itself"
            )
        return Source(kind="dataset", name=f"{path.name}/{split}", dataset=loaded[split])
    return Source(kind="dataset", name=path.name, dataset=loaded)


def _hub(name: str, split: str, streaming: bool) -> Source:
    from datasets import load_dataset

    repository, _, configuration = name.partition(":")
    with nullcontext("") if present.exists(Path(repository)) else offline_if_silent() as silence:
        try:
            loaded = load_dataset(repository, configuration or None, split=split, streaming=streaming)
        except Exception as error:  # network, offline, no such name, split or configuration, a dataset that is a script
            message = f"dataset {name!r} (split {split!r}) cannot be loaded by `datasets`: {error}"
            if silence:
                message += f"; {silence}, there is no file or folder of this name, and this machine's cache lacks it"
            raise DatasetError(message) from None
    return Source(kind="dataset", name=f"{HUB}{name}/{split}", dataset=loaded)


def _document(record: Any, fields: Fields, place: str, done: float) -> Document:
    if fields.chat:
        conversation = preference_of(record, place) if fields.pairs else conversation_of(record, place)
        check_depth([conversation.messages, conversation.rejected, conversation.tools], place)
        text = unicode_text(conversation.to_json(), "the conversation, its tools and calls included,", place)
        return Document(text=text, done=done)
    if not isinstance(record, dict):
        raise DatasetError(f"{place}: found {kind_of(record)}, expected an object with a field {fields.text!r}")
    for name in fields.names:
        if name not in record:
            raise DatasetError(f"{place}: no field {name!r}; the record has {names_in(record)}")
    for name in fields.names[: 2 if fields.pair else 1]:
        if not isinstance(record[name], str):
            raise DatasetError(f"{place}: field {name!r} is {kind_of(record[name])}, expected text")
        unicode_text(record[name], f"field {name!r}", place)
    label = ""
    if fields.label is not None:
        value = record[fields.label]
        if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
            raise DatasetError(f"{place}: label {fields.label!r} is {name_of(value)}, expected text or a whole number")
        label = unicode_text(str(value), f"label {fields.label!r}", place)
    return Document(text=record[fields.text], pair=record[fields.pair] if fields.pair else "", label=label, done=done)


def unicode_text(text: str, what: str, place: str) -> str:
    """The text as it is. Raises `DatasetError` where it holds half of a surrogate pair."""
    if not text.isascii() and (found := SURROGATE.search(text)):
        raise DatasetError(
            f"{place}: {what} holds half of a surrogate pair ({found[0]!a} at character {found.start()}), which is no "
            "Unicode text; remove it, or write the whole pair"
        )
    return text


def unicode_name(name: str) -> str:
    """A file's name as Unicode text: bytes of it that are no UTF-8 become escapes."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _read_json_lines(path: Path, fields: Fields) -> Iterator[Document]:
    for number, (line, done) in enumerate(lines_of(path), start=1):
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            record = parse_values(text, object_pairs_hook=no_duplicates)
        except UnicodeDecodeError as error:
            raise DatasetError(f"{path}:{number}: not UTF-8 text: {error}; convert the file first") from None
        except ValueError as error:
            raise DatasetError(f"{path}:{number}: not valid JSON ({error}); expected one object per line") from None
        yield _document(record, fields, f"{path}:{number}", done)


def _read_text(path: Path, fields: Fields) -> Iterator[Document]:
    if fields.chat:
        raise DatasetError(f"{path} is plain text, expected conversations: JSONL, Parquet or a dataset")
    held: list[str] = []
    done = 0.0
    for number, (raw, done) in enumerate(lines_of(path), start=1):
        line = raw.decode("utf-8-sig" if number == 1 else "utf-8").replace("\r\n", "\n")
        if "\0" in line:
            raise DatasetError(
                f"{path}:{number}: found a NUL character, expected UTF-8 text; convert the file first if it is UTF-16; "
                "a file that ends in them was cut by a crash or a full disk: write it again"
            )
        if fields.unit == "line":
            yield Document(text=line.rstrip("\n"), done=done)
        elif fields.unit == "paragraph" and not line.strip():
            if held:
                yield Document(text="".join(held).rstrip("\n"), done=done)
            held = []
        else:
            held.append(line)
    if held:
        yield Document(text="".join(held) if fields.unit == "file" else "".join(held).rstrip("\n"), done=done)


def _read_parquet(path: Path, fields: Fields) -> Iterator[Document]:
    import pyarrow

    try:
        with open_parquet(path) as file:
            columns, rows = fields.columns(file.schema_arrow.names, str(path)), file.metadata.num_rows
            for number, record in enumerate(parquet_rows(file, columns), start=1):
                yield _document(_row(record, fields), fields, f"{path}: row {number}", number / rows)
    except pyarrow.ArrowException as error:
        raise DatasetError(f"{path} is not a readable Parquet file: {error}") from None


def _read_arrow(path: Path, fields: Fields) -> Iterator[Document]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file:
            schema, batches = opened_arrow(file)
            columns, number, size = fields.columns(schema.names, str(path)), 0, max(file.size(), 1)
            for batch in batches:
                for record in batch_rows(batch.select(columns)):
                    number += 1
                    place = f"{path}: row {number}"
                    yield _document(_row(record, fields), fields, place, min(file.tell() / size, 1.0))
    except pyarrow.ArrowException as error:
        raise DatasetError(f"{path} is not a readable Arrow file: {error}") from None


def _read_dataset(source: Source, fields: Fields) -> Iterator[Document]:
    dataset = source.dataset
    if dataset.column_names or not fields.chat:
        dataset = dataset.select_columns(fields.columns(list(dataset.column_names or fields.names), source.name))
    rows = len(dataset) if hasattr(dataset, "__len__") else 0
    for number, record in enumerate(_records(dataset, source.name), start=1):
        done = number / rows if rows else 0.0
        yield _document(_row(record, fields), fields, f"{source.name}: row {number}", done)


def _records(dataset: Any, name: str) -> Iterator[Any]:
    """The records of a dataset. Raises `DatasetError` where it cannot be read on: a damaged file, a network.

    A table on disk is validated as a whole, for `datasets` follows its offsets wherever they lead, and its files are
    followed to their ends, for `datasets` reads one that was cut between two batches as if it were whole.
    """
    try:
        for file in getattr(dataset, "cache_files", []):
            check_stream(file["filename"])
        if hasattr(dataset, "data"):
            dataset.data.validate(full=True)
        yield from dataset
    except Exception as error:  # whatever its format, or the hub's client, raises
        raise DatasetError(f"{name} cannot be read: {type(error).__name__}: {first_line(error):.200}") from None


def _row(record: Any, fields: Fields) -> Any:
    """A record of a table; of conversations without the keys that are there for other rows only."""
    return without_absent(record) if fields.chat else record
