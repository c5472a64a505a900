"""JSON from another institution: read up to a size, to a depth, with finite bounded numbers and printable bounded text.

Used for manifest.json, report.json and failure.json. Every refusal is a `ManifestError` of one sentence, whatever the
file contains; no part of a message is longer than a line or contains a control character.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import stat
import unicodedata
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from facility.exchange.errors import ManifestError
from facility.exchange.json_text import no_duplicates, parse_values

DEPTH = 12
"""Lists and mappings inside one another."""
ITEMS = 200_000
"""Values in one file."""
LARGEST_WHOLE = 2**63 - 1
LONGEST_NUMBER = 40
"""Characters."""
LONGEST_TEXT = 64 << 10
LONGEST_NAME = 500
UNPRINTABLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories not allowed in text: controls, invisible marks, lone surrogates, line and paragraph separators."""
UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Letters and marks that leave nothing, or a blank, on a screen (Unicode: Default_Ignorable_Code_Point; U+2800)."""
MOST_MARKS = 3
"""Marks above and below one letter; more of them grow over the lines beside it."""
HEX = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T")


def read_json(path: Path, *, most_bytes: int) -> dict[str, Any]:
    """The object in the file `path`. Raises `ManifestError`, also where it is missing (never `FileNotFoundError`)."""
    return parse_json(_text(Path(path), most_bytes), where=path)


def read_message(path: Path, kind: type, *, newest: int, most_bytes: int) -> Fields:
    """The fields of a `kind`, a dataclass, in the file `path`, of format `newest` or older. Raises `ManifestError`."""
    return Fields(raw=read_json(path, most_bytes=most_bytes), where=str(path)).of_format(newest).only_of(kind)


def parse_json(text: str, *, where: Path | str, bounded: bool = True) -> dict[str, Any]:
    """The object in `text`; `where` names its source in errors. Raises `ManifestError`.

    `bounded`: refuse what is nested deep, many or long, as no message of another institution has to be. A file of our
    own is as large as the federation.
    """
    path = where
    try:
        value = parse_values(
            text,
            parse_int=_whole,
            parse_float=_real,
            parse_constant=_no_constant,
            object_pairs_hook=no_duplicates,
        )
    except ValueError as error:
        raise ManifestError(f"{path} cannot be read, it is malformed: {clean_text(str(error), 200)}") from None
    if not isinstance(value, dict):
        raise ManifestError(f"{path} is malformed: it holds a {type(value).__name__}, expected a mapping")
    if bounded:
        _bounded(value, path)
    return value


def clean_text(text: str, longest: int = 1000, *, lines: bool = False) -> str:
    """Printable text from another machine: unprintable characters become `?`, the middle of too long a text `...`.

    With `lines`, line ends and tabs stay.
    """
    kept = "\n\t" if lines else ""
    if len(text) > longest:
        text = f"{text[: longest * 2 // 3]}...{text[-(longest // 3) :]}"
    text = show_unseen(text)
    if not lines:
        text = " ".join(text.split())
    return "".join(c if c in kept or unicodedata.category(c) not in UNPRINTABLE else "?" for c in text)


def show_unseen(text: str) -> str:
    """Text whose letters all show, each within its own line: unseen ones become `?`, surplus marks on one are left
    out."""
    if text.isascii():
        return text
    kept, marks = [], 0
    for letter in UNSEEN.sub("?", text):
        marks = marks + 1 if unicodedata.category(letter) in ("Mn", "Me") else 0
        if marks <= MOST_MARKS:
            kept.append(letter)
    return "".join(kept)


def is_printable(text: str) -> bool:
    """True when no character of the text is unprintable."""
    return text.isprintable() or not any(unicodedata.category(c) in UNPRINTABLE for c in text)


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The keys of one mapping, taken with their types and bounds. Each method raises `ManifestError` naming the key."""

    raw: dict[str, Any]
    where: str
    """File, and key inside it, for messages."""

    def only(self, known: Collection[str]) -> Fields:
        """Refuse keys that are not known."""
        if unknown := sorted(set(self.raw) - set(known)):
            raise ManifestError(
                f"{self.where} has unknown keys {[clean_text(key, 60) for key in unknown[:5]]}; known are "
                f"{sorted(known)}"
            )
        return self

    def only_of(self, kind: type) -> Fields:
        """Refuse keys that are not fields of the dataclass `kind`."""
        return self.only([field.name for field in dataclasses.fields(kind)])

    def of_format(self, newest: int) -> Fields:
        """Refuse a newer `format` than `newest`, before its keys are refused as unknown."""
        found = self.raw.get("format")
        if type(found) is int and found > newest:
            raise ManifestError(
                f"{self.where} has format {found}, this version reads up to {newest}: update CrossFed here"
            )
        return self

    def whole(self, name: str, default: int | None = None, *, least: int = 0, most: int = LARGEST_WHOLE) -> int:
        value = self._take(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(name, value, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float | None = None, *, least: float = 0.0, most: float = 1e15) -> float:
        value = self._take(name, default)
        if type(value) not in (int, float) or not least <= value <= most:
            raise self._wrong(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def text(self, name: str, default: str | None = None, *, longest: int = LONGEST_NAME) -> str:
        value = self._take(name, default)
        if not isinstance(value, str) or len(value) > longest or not is_printable(value):
            raise self._wrong(name, value, f"printable text of at most {longest} characters")
        return value

    def words(self, name: str, default: str | None = None, *, longest: int, lines: bool = False) -> str:
        """Text meant for a person, cleaned rather than refused."""
        value = self._take(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "text")
        return clean_text(value, longest, lines=lines)

    def flag(self, name: str, default: bool) -> bool:
        value = self._take(name, default)
        if type(value) is not bool:
            raise self._wrong(name, value, "true or false")
        return value

    def one_of(self, name: str, default: str, choices: Collection[str]) -> Any:
        value = self._take(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self._wrong(name, value, f"one of {', '.join(choices)}")
        return value

    def digest(self, name: str) -> str:
        value = self._take(name, None)
        if not isinstance(value, str) or not HEX.fullmatch(value):
            raise self._wrong(name, value, "a sha256 of 64 hexadecimal digits")
        return value

    def mapping(self, name: str, most: int) -> dict[str, Any]:
        """A mapping of at most `most` entries with printable names; {} where the key is missing."""
        value = self._take(name, {})
        if not isinstance(value, dict) or len(value) > most:
            raise self._wrong(name, value, f"a mapping of at most {most} entries")
        if odd := next((key for key in value if not key or len(key) > LONGEST_NAME or not is_printable(key)), None):
            raise ManifestError(f"{self.where} names {clean_text(odd, 60)!r} in {name}, expected printable names")
        return value

    def items(self, name: str, most: int, check: Callable[[Fields, str], T]) -> list[T]:
        """A list of at most `most` items, each of them passed to `check` under the name of its place."""
        value = self._take(name, [])
        if not isinstance(value, list) or len(value) > most:
            raise self._wrong(name, value, f"a list of at most {most} items")
        inside = Fields(raw={f"{name}[{number}]": item for number, item in enumerate(value)}, where=self.where)
        return [check(inside, key) for key in inside.raw]

    def inside(self, name: str, most: int = 1000) -> Fields:
        """The fields of the mapping under a key, of at most `most` entries."""
        return Fields(raw=self.mapping(name, most), where=f"{self.where}: {name}")

    def _take(self, name: str, default: Any) -> Any:
        if name in self.raw:
            return self.raw[name]
        if default is None:
            raise ManifestError(f"{self.where} lacks {name}")
        return default

    def _wrong(self, name: str, value: Any, expected: str) -> ManifestError:
        found = clean_text(repr(value)[:200] if not isinstance(value, dict | list) else type(value).__name__, 60)
        return ManifestError(f"{self.where} has {found} for {clean_text(name, 60)}, expected {expected}")


def _text(path: Path, most_bytes: int) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe would block
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ManifestError(f"{path} is not a regular file")
            if found.st_size > most_bytes:
                raise ManifestError(f"{path} has {found.st_size} bytes, expected at most {most_bytes}")
            content = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise ManifestError(
            f"{path} is missing: the directory is incomplete or was not made by CrossFed; it holds no {path.name}"
        ) from None
    except OSError as error:
        raise ManifestError(f"{path} cannot be read: {error}") from None
    if len(content) > most_bytes:
        raise ManifestError(f"{path} has more than {most_bytes} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ManifestError(
            f"{path} cannot be read, it is malformed: not UTF-8 ({error.reason} at byte {error.start})"
        ) from None


def _whole(text: str) -> int:
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _real(text: str) -> float:
    value = float(text) if len(text) <= LONGEST_NUMBER else math.inf
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large or too long")
    return value


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number in JSON")


def _bounded(value: Any, path: Path | str) -> None:
    """Refuse values that are nested too deep, too many, too long or not text."""
    level, count = [value], 0
    for _ in range(DEPTH + 1):
        following: list[Any] = []
        for one in level:
            count += 1
            if isinstance(one, str) and (len(one) > LONGEST_TEXT or not _encodes(one)):
                raise ManifestError(f"{path} is malformed: text of {len(one)} characters, or with lone surrogates")
            if isinstance(one, dict):
                following.extend(one)
                following.extend(one.values())
            elif isinstance(one, list):
                following.extend(one)
        if count + len(following) > ITEMS:
            raise ManifestError(f"{path} is malformed: it holds more than {ITEMS} values")
        if not following:
            return
        level = following
    raise ManifestError(f"{path} is malformed: lists or mappings are nested more than {DEPTH} deep")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
