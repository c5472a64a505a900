"""Are two copies of an audit log one log? A coordinator could keep two, and show each facility its own.

    17:5d41...    # a head, as `audit head` prints it: the number of lines, and the digest of the last

Each line holds the digest of the line before, so that a head binds all lines up to its own: institutions that exchange
heads by a way that does not lead through the log's owner see whether they were shown the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from facility.exchange.errors import InputError
from facility.exchange.files.audit_log import Verdict, digest_of, follow_chain, lines_of, verify_log
from facility.exchange.files.bounded import open_file
from facility.exchange.json_text import object_in
from facility.exchange.messages.strict_json import clean_text

HEAD = re.compile(r"(?:([1-9]\d{0,14}):)?([0-9a-fA-F]{64})")
SEEN = "coordinators_head"
"""In a gate's log: head of the coordinator's log, as the order of an approved round held it."""


def digest_in(head: str) -> str:
    """The digest in a head, with or without its number of lines. Raises `InputError` for anything else."""
    if (found := HEAD.fullmatch(head)) is None:
        raise InputError(f"{head!r:.100} is no head, expected LINES:SHA256 as `audit head` prints it, or a sha256")
    return found[2].lower()


def checked(file: Path, heads: list[str]) -> Verdict:
    """`verify`, of heads of either form. Raises `InputError` where the log cannot be read."""
    try:
        return verify_log(file, [digest_in(one) for one in heads])
    except OSError as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: OSError) -> InputError:
    return InputError(f"{file} cannot be read: {error.strerror}; expected an audit log")


def verify_heads(file: Path, heads: list[str]) -> tuple[str, int]:
    """A sentence on a log, in which `heads` were seen, and the exit code. Raises `InputError` as `checked`."""
    found = checked(file, heads)
    return found.sentence(file), int(found.broken > 0)


def head_of(file: Path) -> str:
    """The head of a sound log. Raises `InputError` for one that is broken or cannot be read."""
    found = checked(file, [])
    if found.broken:
        raise InputError(found.sentence(file))
    return f"{found.lines}:{found.head}"


def compare_logs(file: Path, others: list[str]) -> tuple[str, int]:
    """A sentence on each of `others`, and the exit code: 1 unless each is the beginning of the log, or it of them.

    An other is a head, a copy of the log, or a gate's log, whose approved rounds hold the heads that came with their
    orders. Raises `InputError` for a log that is broken or cannot be read.
    """
    if not others:
        raise InputError("nothing to compare with, expected `audit compare FILE OTHER...`: heads, or copies of the log")
    mine = _lines_of(file)
    results = [_of_head(file, mine, one) if HEAD.fullmatch(one) else _of_file(file, mine, Path(one)) for one in others]
    return "\n".join(text for text, _ in results), int(not all(good for _, good in results))


def _lines_of(file: Path) -> list[bytes]:
    """Lines of a sound log without their ends, read once: it may be a pipe of a shell's `<(...)`."""
    lines: list[bytes] = []

    def kept(opened: BinaryIO) -> Iterator[bytes]:
        for line in lines_of(opened):
            lines.append(line.removesuffix(b"\n"))
            yield line

    try:
        with open_file(file) as opened:
            found = follow_chain(kept(opened))
    except OSError as error:
        raise _unreadable(file, error) from None
    if found.broken:
        raise InputError(found.sentence(file))
    return lines


def _of_head(file: Path, mine: list[bytes], other: str) -> tuple[str, bool]:
    found = HEAD.fullmatch(other)
    assert found is not None
    digest, lines = found[2].lower(), len(mine)
    if found[1] is None:
        at = next((number for number, line in enumerate(mine, 1) if digest_of(line) == digest), 0)
        if at:
            return f"{other}: is line {at} of the {lines} of {file}", True
        return f"{other}: no line of {file} has this digest: another log, or a later line of this one", False
    number = int(found[1])
    if number > lines:
        own = f"{lines}:{digest_of(mine[-1])}"
        return f"{other}: {file} has {lines} lines, too few for a verdict; compare {own} with the longer log", False
    if (here := digest_of(mine[number - 1])) == digest:
        return f"{other}: is line {number} of the {lines} of {file}", True
    return f"{other}: line {number} of {file} has the digest {here}: TWO LOGS, which part at this line or before", False


def _of_file(file: Path, mine: list[bytes], other: Path) -> tuple[str, bool]:
    theirs = _lines_of(other)
    same = next((at for at, (one, two) in enumerate(zip(mine, theirs, strict=False)) if one != two), None)
    if same is None:
        shorter, longer = sorted((len(mine), len(theirs)))
        return f"{other}: one log with {file}: the first {shorter} lines of {longer} are the same", True
    if same == 0 and (seen := _seen_in(theirs)):
        return _of_seen(file, mine, other, seen)
    parting = f"line {same + 1} is {_describe_entry(theirs[same])} there, {_describe_entry(mine[same])} in {file}"
    return f"{other}: TWO LOGS: the first {same} lines are those of {file}; {parting}", False


def _of_seen(file: Path, mine: list[bytes], other: Path, seen: dict[str, dict[str, Any]]) -> tuple[str, bool]:
    known = {digest_of(line) for line in mine}
    for head, entry in seen.items():
        if head not in known:
            round = clean_text(f"{entry.get('federation')}, round {entry.get('round')}", 100)
            return (
                f"{other}: the order of {round} came with the head {clean_text(head, 64)}, which no line of {file} "
                "has: TWO LOGS, or this copy is older than that order",
                False,
            )
    return f"{other}: all {len(seen)} heads that came with its orders are lines of {file}", True


def _seen_in(lines: list[bytes]) -> dict[str, dict[str, Any]]:
    """Entries of a gate's log by the head of the coordinator's log that they hold."""
    entries = (object_in(line) or {} for line in lines)
    return {str(entry[SEEN]).lower(): entry for entry in entries if entry.get(SEEN)}


def _describe_entry(line: bytes) -> str:
    entry = object_in(line) or {}
    return clean_text(f"{entry.get('what')} of {entry.get('time')}", 100)
