"""A private copy of a request to unmask: what is checked is then what is answered, whoever can write the original.

Only the files that a request has are read, each up to a limit, and no link is followed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from facility.exchange.errors import InputError
from facility.exchange.masking.roster import AGREEMENT, FOLDER, KEYS
from facility.exchange.masking.roster import MOST_BYTES as MOST_AGREEMENT
from facility.exchange.masking.shares import MOST_BYTES as MOST_SHARES
from facility.exchange.masking.shares import MOST_MEMBERS
from facility.exchange.masking.unmasking import REQUEST, ROSTER, SHARES
from facility.exchange.messages.manifest import NAME, SIGNATURE

MOST_SMALL = 1 << 20
"""Bytes of each of the other files."""


@contextmanager
def private_copy(request: Path) -> Iterator[Path]:
    """A directory with the files of `request`, which only this account can write. Raises `InputError`."""
    with tempfile.TemporaryDirectory(prefix="crossfed-request-") as place:
        copy = Path(place)
        for name, most in _files(Path(request)):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(_content(Path(request) / name, most))
        yield copy


def _files(request: Path) -> Iterator[tuple[str, int]]:
    """Path and most bytes of each file."""
    yield REQUEST, MOST_SMALL
    yield f"{ROSTER}/{AGREEMENT}", MOST_AGREEMENT
    for member in _names(request / ROSTER / FOLDER):
        for name in (KEYS, NAME, SIGNATURE):
            yield f"{ROSTER}/{FOLDER}/{member}/{name}", MOST_SMALL
    for name in _names(request / SHARES):
        yield f"{SHARES}/{name}", MOST_SHARES


def _names(directory: Path) -> list[str]:
    names = sorted(os.listdir(directory)) if directory.is_dir() else []
    if len(names) > MOST_MEMBERS:
        raise InputError(f"{directory} has {len(names)} entries, expected at most {MOST_MEMBERS}")
    return names


def _content(path: Path, most: int) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise InputError(f"the request has no {path.name} that can be read: {error.strerror}") from None
    if len(content) > most:
        raise InputError(f"{path.name} of the request is larger than {most} bytes")
    return content
