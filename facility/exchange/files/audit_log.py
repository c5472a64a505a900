"""An append-only log in which every line holds the sha256 of the line before: JSON lines, locked and synced.

    {"number": 0, "time": "2026-03-01T12:00:00+00:00", "previous": "000...", "what": "submit", ...}

Changing, removing or inserting a line breaks the chain at that line. Cutting lines off the end leaves a sound chain, so
the digest of the last line (the head) belongs somewhere else too: a gate's head goes into updates' manifests, the
coordinator's into models' (`HEAD`), and `verify_log` is given heads that were seen.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from facility.exchange.files.bounded import open_file
from facility.exchange.files.durable import fsync_directory, write_all
from facility.exchange.files.locks import take_lock
from facility.exchange.json_text import object_in

HEAD = "audit"
"""In a manifest's `extra`: head of its maker's log when it was made."""
AUDIT = "CROSSFED_AUDIT"
"""Environment variable: the log of a gate, for the round that it starts, whose update carries the head."""
FIRST = "0" * 64
"""`previous` of the first line."""
TORN = "torn"
"""`what` of the line that follows one that was cut off while it was written (power cut, full disk)."""
EMPTY = "there is none, and a log is made with its first line: its lines were removed, or the disk was full"
LONGEST_LINE = 1 << 16
OWN = ("number", "time", "previous", "what")


def digest_of(line: bytes) -> str:
    """The sha256 of one line without its end, in hexadecimal."""
    return hashlib.sha256(line).hexdigest()


def append(path: Path, what: str, **fields: Any) -> str:
    """Add a line; returns the new head. Makes the file with mode 0600. Raises `OSError` where it cannot be written."""
    assert not set(fields) & set(OWN), fields
    with _locked(Path(path)) as file:
        last, whole, number = _last(file)
        if not whole:
            os.write(file, b"\n")
            last = _write(file, number, last, TORN, {})
            number += 1
        line = _write(file, number, last, what, fields)
        os.fsync(file)
        if number == 0:
            fsync_directory(Path(path).parent)
    return digest_of(line)


def head_digest(path: Path) -> str:
    """Digest of the last line; '' for a log that does not exist or is empty."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        last, _, _ = _last(file)
    finally:
        os.close(file)
    return digest_of(last) if last else ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What `verify_log` found."""

    lines: int
    """Sound ones from the beginning."""
    head: str
    """Digest of the last of them."""
    broken: int = 0
    """Number of the first broken line, counted from 1; 0: none."""
    reason: str = ""

    def sentence(self, file: Path) -> str:
        """The verdict on `file` as a sentence."""
        if self.broken:
            return f"{file}: line {self.broken} is broken: {self.reason}; {self.lines} lines before it are sound"
        return f"{file}: {self.lines} lines, unbroken; the head is {self.head}"


def verify_log(path: Path, heads: Collection[str] = ()) -> Verdict:
    """Follow the chain of a log as `follow_chain` does. Raises `OSError` for what cannot be read or is not a file."""
    with open_file(path) as file:
        return follow_chain(lines_of(file), heads)


def follow_chain(lines: Iterable[bytes], heads: Collection[str] = ()) -> Verdict:
    """Follow the chain. `heads`: digests that were seen before, each of which must be a line's."""
    previous, count, torn = FIRST, 0, ""
    missing = {one.lower() for one in heads}
    for number, raw in enumerate(lines):
        count = number + 1
        if torn and _reason(raw, number, previous, what=TORN):
            return Verdict(lines=number - 1, head=previous, broken=number, reason=torn)
        torn = ""
        if reason := _reason(raw, number, previous):
            if _whole(raw) is not None:
                return Verdict(lines=number, head=previous, broken=number + 1, reason=reason)
            torn = reason  # a line that was cut off is followed by one that says so
        previous = digest_of(raw.rstrip(b"\n"))
        missing.discard(previous)
    if torn:
        return Verdict(lines=count - 1, head=previous, broken=count, reason=torn)
    if not count:
        return Verdict(lines=0, head=previous, broken=1, reason=EMPTY)
    if missing:
        reason = f"no line has the digest {sorted(missing)[0]}, which was seen before: lines were cut off or rewritten"
        return Verdict(lines=count, head=previous, broken=count + 1, reason=reason)
    return Verdict(lines=count, head=previous)


def _reason(raw: bytes, number: int, previous: str, what: str = "") -> str:
    """Why this line is not the next of the chain, or ''."""
    if (entry := _whole(raw)) is None:
        return "it is cut off or not a JSON object"
    if entry.get("number") != number:
        return f"it says that it is number {entry.get('number')!r:.20}, expected {number}"
    if entry.get("previous") != previous:
        return "it does not hold the digest of the line before: this line or that one was altered, removed or inserted"
    if what and entry.get("what") != what:
        return f"it is {entry.get('what')!r:.20}, expected {what!r}"
    return ""


def _whole(raw: bytes) -> dict[str, Any] | None:
    """The entry in a line that ends as one; None where it is cut off, or no object."""
    return object_in(raw) if raw.endswith(b"\n") else None


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Lines of the file; one that is longer than any of ours comes in parts, which are no JSON."""
    while raw := file.readline(LONGEST_LINE):
        yield raw


def _write(file: int, number: int, last: bytes, what: str, fields: dict[str, Any]) -> bytes:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    entry = {"number": number, "time": now, "previous": digest_of(last) if last else FIRST, "what": what, **fields}
    line = json.dumps(entry, allow_nan=False).encode()
    if len(line) >= LONGEST_LINE:
        line = json.dumps({key: entry[key] for key in OWN} | {"cut": len(line)}).encode()
    write_all(file, line + b"\n")
    return line


def _last(file: int) -> tuple[bytes, bool, int]:
    """The last line, whether it is whole, and the number of the next."""
    size = os.fstat(file).st_size
    if not size:
        return b"", True, 0
    tail = os.pread(file, min(size, 2 * LONGEST_LINE), max(0, size - 2 * LONGEST_LINE))
    whole = tail.endswith(b"\n")
    lines = tail.removesuffix(b"\n").split(b"\n")
    number = next(
        (
            len(lines) - at - 1 + _number(line) + 1
            for at, line in reversed(list(enumerate(lines)))
            if _number(line) >= 0
        ),
        len(lines),
    )
    return lines[-1], whole, number


def _number(line: bytes) -> int:
    """Number of a line, or -1 where it has none."""
    try:
        return int((object_in(line) or {})["number"])
    except (ValueError, KeyError, TypeError):
        return -1


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        take_lock(file, path)
        yield file
    finally:
        os.close(file)
