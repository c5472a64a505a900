"""Private copies of a request to unmask, of a roster, and of a model's manifest: what is checked is what is used,
whoever can write them.

Only the files that one has are read, each up to a limit, and no link is followed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from facility.exchange.errors import InputError
from facility.exchange.files import present
from facility.exchange.masking.roster import AGREEMENT, FOLDER, KEYS
from facility.exchange.masking.roster import MOST_BYTES as MOST_AGREEMENT
from facility.exchange.masking.shares import MOST_BYTES as MOST_SHARES
from facility.exchange.masking.shares import MOST_MEMBERS
from facility.exchange.masking.unmasking import REQUEST, ROSTER, SHARES
from facility.exchange.messages.manifest import MOST_BYTES as MANIFEST_BYTES
from facility.exchange.messages.manifest import NAME, SIGNATURE

MOST_SMALL = 1 << 20
"""Bytes of each of the other files."""


@contextmanager
def private_copy(request: Path) -> Iterator[Path]:
    """A directory with the files of `request`, which only this account can write. Raises `InputError`."""
    with _copied(Path(request), _files(Path(request)), "request") as copy:
        yield copy


@contextmanager
def private_roster(roster: Path) -> Iterator[Path]:
    """A directory with the files of a roster, which only this account can write. Raises `InputError`."""
    with _copied(Path(roster), _files_of_roster(Path(roster)), "roster") as copy:
        yield copy


@contextmanager
def private_manifest(model: Path) -> Iterator[Path]:
    """A directory with a model's manifest, and its signature where there is one, which only this account can write."""
    files = [(NAME, MANIFEST_BYTES), (SIGNATURE, MOST_SMALL)]
    with _copied(Path(model), files if os.path.lexists(Path(model) / SIGNATURE) else files[:1], "model") as copy:
        yield copy


@contextmanager
def _copied(source: Path, files: Iterable[tuple[str, int]], what: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=f"crossfed-{what}-") as place:
        copy = Path(place)
        for name, most in files:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(_content(source / name, most, what))
        yield copy


def _files(request: Path) -> Iterator[tuple[str, int]]:
    """Path and most bytes of each file."""
    yield REQUEST, MOST_SMALL
    for name, most in _files_of_roster(request / ROSTER):
        yield f"{ROSTER}/{name}", most
    for name in _names(request / SHARES):
        yield f"{SHARES}/{name}", MOST_SHARES


def _files_of_roster(roster: Path) -> Iterator[tuple[str, int]]:
    yield AGREEMENT, MOST_AGREEMENT
    for member in _names(roster / FOLDER):
        for name in (KEYS, NAME, SIGNATURE):
            yield f"{FOLDER}/{member}/{name}", MOST_SMALL


def _names(directory: Path) -> list[str]:
    names = sorted(os.listdir(directory)) if present.is_dir(directory) else []
    if len(names) > MOST_MEMBERS:
        raise InputError(f"{directory} has {len(names)} entries, expected at most {MOST_MEMBERS}")
    return names


def _content(path: Path, most: int, what: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise InputError(f"the {what} has no {path.name} that can be read: {error.strerror}") from None
    if len(content) > most:
        raise InputError(f"{path.name} of the {what} is larger than {most} bytes")
    return content
