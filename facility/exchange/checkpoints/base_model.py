"""The digest of a base model that stays at a facility (`training.lora.base`): hashed once, remembered while its files
are the same.

The digest is a manifest's (`content_sha256`): over the digests of the tensor files, equal where the same bytes are in
the same files, as in two downloads of one published model. What was hashed is remembered in the user's cache for
all federations, by path, size, inode and times of each file; where there is no cache, each job hashes again.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.errors import InputError
from facility.exchange.files.durable import write_json
from facility.exchange.files.user_cache import ours_alone, user_cache
from facility.exchange.messages.manifest import content_digest

NAME = "base-models.json"
MOST_FILES = 2_000
"""Files whose digests are remembered; the oldest are forgotten first."""
Known = dict[str, tuple[list[int], str]]
"""Digest of a file by its path, with what it looked like when it was hashed."""

log = logging.getLogger(__name__)


def base_digest(directory: Path, *, until: float = math.inf) -> str:
    """Digest of the tensor files of the checkpoint in `directory`. Raises `CheckpointError` where it is none.

    `until`: when, by `time.monotonic`, hashing is given up; raises `TimeoutError` then.
    """
    known = _remembered()
    return content_digest({file.name: _known(file, known) or _hashed(file, until) for file in tensor_files(directory)})


def remembered_digest(directory: Path) -> str | None:
    """`base_digest` where every file was hashed before and has not changed since; None: it would read files."""
    known, found = _remembered(), {}
    for file in tensor_files(directory):
        if (digest := _known(file, known)) is None:
            return None
        found[file.name] = digest
    return content_digest(found)


def check_base(directory: Path, expected: str) -> None:
    """Raise `InputError` where the base model in `directory` is not the one with the digest `expected`."""
    if (found := base_digest(directory)) != expected:
        raise InputError(
            f"the base model {directory} has the digest {found}, expected training.lora.base_sha256 {expected}: the "
            "adapters of this federation belong to other weights; fetch the base that the federation names"
        )


def tensor_files(directory: Path) -> list[Path]:
    """The checkpoint's tensor files, sorted."""
    return sorted({entry.file for entry in open_checkpoint(directory).tensors.values()})


def _known(file: Path, known: Known) -> str | None:
    """The digest of a file that looks as it did when it was hashed, else None."""
    path = file.resolve()
    looks, digest = known.get(str(path), ([], ""))
    return digest if _looks(path) == looks else None


def _hashed(file: Path, until: float) -> str:
    """The digest of a file, remembered unless it changed meanwhile. Raises `TimeoutError`."""
    path = file.resolve()
    before = _looks(path)
    log.info("hashing %s (%.1f GB) for the digest of the base model", path, path.stat().st_size / 1e9)
    digest = sha256_until(path, until)
    if _looks(path) == before:
        _remember(path, before, digest)
    return digest


def sha256_until(path: Path, until: float) -> str:
    """sha256 of a file; raises `TimeoutError` when `time.monotonic` is at `until`."""
    with _Hurried(path, until) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


class _Hurried(io.FileIO):
    """A file that is read until a time."""

    def __init__(self, path: Path, until: float) -> None:
        super().__init__(path)
        self._until = until

    def readinto(self, buffer: Any) -> int | None:
        if time.monotonic() >= self._until:
            raise TimeoutError(f"{self.name} was not read to its end in time")
        return super().readinto(buffer)


def _looks(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _remembered() -> Known:
    """Nothing where the record is missing, malformed, or others could have written it."""
    folder = user_cache()
    if folder is None or not ours_alone(folder / NAME):
        return {}
    try:
        raw = json.loads((folder / NAME).read_bytes())
        return {str(path): ([int(one) for one in looks], str(digest)) for path, (looks, digest) in raw.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _remember(path: Path, looks: list[int], digest: str) -> None:
    """Two processes that write at once may each forget what the other hashed, which is then hashed again."""
    if (folder := user_cache()) is None:
        return
    known: Mapping[str, object] = {key: value for key, value in _remembered().items() if key != str(path)}
    kept = dict([*known.items(), (str(path), (looks, digest))][-MOST_FILES:])
    try:
        write_json(folder / NAME, kept)
    except OSError as error:
        log.info("the digest of %s is not remembered: %s", path, error)
