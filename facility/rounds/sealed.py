"""Directories of a facility's state that say themselves whether they are whole: `seal.json` has each file's checksum.

What a round keeps for the next (optimizer state, mid-round checkpoint, local parameters, residual) is sealed where it
is written, and verified before a round uses it. While a directory that the round needs is damaged, the facility skips
the round: the operator restores the directory, or removes it, and the round begins without it as on the first day. One
that the round does without (a mid-round checkpoint, what a repeated round left) is put aside. One from before seals
existed is used as it is; one of before checksums has sha256 in its seal.

A file that still has the inode, size and times that it had when it was sealed is not read again for its checksum: only
this account can write there, and whatever writes to a file changes its times (`ctime` cannot be set). What copies,
moves back or truncates a file is noticed; a disk that returns other bytes than it was given is not.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from facility.exchange.errors import InputError
from facility.exchange.files import present
from facility.exchange.files.checksum import checksum_of, is_checksum
from facility.exchange.files.durable import fsync_directory, write_json
from facility.exchange.json_values import note_in, values_in
from facility.exchange.messages.manifest import sha256_of
from facility.rounds.kept import latest_before

SEAL = "seal.json"
UNCHANGED = "seal-files.json"
"""Inode, size, mtime and ctime (ns) of each sealed file, by name. Means nothing after a copy."""
TICK_SECONDS = 0.05
ASIDE = "damaged"
NEW, OLD = ".new", ".old"
"""Ends of the names of directories that take another one's place, or gave theirs away."""
SELF_CHECKED = ("finished", "models", ASIDE)
"""Parts of the state that have manifests of their own, and what was put aside before."""


def write_seal(directory: Path, known: Mapping[str, str] | None = None) -> None:
    """Write the checksums of the files of a complete directory.

    `known`: those of files hashed as they were written.
    """
    paths = [path for path in sorted(directory.iterdir()) if path.is_file() and path.name not in (SEAL, UNCHANGED)]
    write_json(directory / SEAL, {path.name: (known or {}).get(path.name) or checksum_of(path) for path in paths})
    _outlast_clock_tick(paths)
    write_json(directory / UNCHANGED, {path.name: identity(path) for path in paths})


def _outlast_clock_tick(paths: Sequence[Path]) -> None:
    """Wait until whatever is written from now on has later times than these files: the kernel's clock ticks every few
    milliseconds."""
    newest = max((path.stat().st_ctime for path in paths), default=0.0)
    time.sleep(min(TICK_SECONDS, max(0.0, newest + TICK_SECONDS - time.time())))


def identity(path: Path) -> list[int]:
    """What changes when a file is written to, truncated, or replaced by a copy."""
    found = path.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def unchanged(directory: Path) -> dict[str, list[int]]:
    """What `write_seal` noted of the files; nothing where the note is absent or no longer readable."""
    noted = note_in(directory / UNCHANGED)
    return noted if isinstance(noted, dict) else {}


def find_flaw(directory: Path) -> str:
    """What differs from the seal, '' for nothing."""
    try:
        promised, noted = values_in(directory / SEAL), unchanged(directory)
        for name, digest in promised.items():
            path = directory / name
            if not present.is_file(path):
                return f"{path} is missing"
            if noted.get(name) != identity(path) and not _has(path, digest):
                return f"{path} was altered"
    except (OSError, ValueError, AttributeError) as error:
        return f"{directory / SEAL} cannot be read: {error}"
    return ""


def _has(path: Path, digest: str) -> bool:
    return digest == (checksum_of(path) if is_checksum(digest) else sha256_of(path))


def check_kept(state: Path, round: int, *, evaluates: bool = False) -> list[str]:
    """Verify what a facility keeps. Moves damaged directories that `round` can do without to `damaged/`, and returns a
    sentence for each. Raises `InputError` for one that it needs; `evaluates`: no step is taken in it."""
    _finish_replacements(state)
    sentences = []
    for found in sorted(state.rglob(SEAL)):
        directory = found.parent
        inner = directory.relative_to(state)
        if inner.parts[:1] and inner.parts[0] in SELF_CHECKED or not (reason := find_flaw(directory)):
            continue
        if _needed(directory, state, round, evaluates):
            raise InputError(
                f"{reason}, which round {round} goes on from: restore it from a copy, or remove {directory} to begin "
                "without it, from the received model"
            )
        aside = state / ASIDE / f"{'-'.join(inner.parts)}-{time.strftime('%Y%m%d-%H%M%S')}"
        aside.parent.mkdir(exist_ok=True)
        directory.rename(aside)
        sentences.append(f"{reason}: put aside in {aside}; this round does without it")
    return sentences


def _needed(directory: Path, state: Path, round: int, evaluates: bool) -> bool:
    """Whether the round's result depends on it: the newest of its kind before the round."""
    if directory.parent == state:
        return directory == latest_before(state, round) and not evaluates
    return directory == latest_before(directory.parent, round)


def replace_directory(path: Path, new: Path) -> None:
    """Put the complete directory `new` in the place of `path`, which is removed afterwards.

    To remove what is large takes seconds, in which a scheduler may kill: before, it would be neither here nor there.
    """
    old = path.with_name(path.name + OLD)
    discard_sealed(old)
    with suppress(FileNotFoundError):
        os.rename(path, old)
    os.rename(new, path)
    fsync_directory(path.parent)
    discard_sealed(old)


def _finish_replacements(state: Path) -> None:
    """Where a kill came between the two moves of `replace_directory`, make the second."""
    for new in sorted(state.rglob(f"*{NEW}")):
        path = new.with_name(new.name.removesuffix(NEW))
        if present.is_dir(path.with_name(path.name + OLD)) and not present.exists(path) and not find_flaw(new):
            os.rename(new, path)


def discard_sealed(directory: Path) -> None:
    """Remove a directory of the state; the seal first, so that what a kill leaves of it is not taken for damaged."""
    with suppress(OSError):
        (directory / SEAL).unlink()
    shutil.rmtree(directory, ignore_errors=True)
