"""Remove what the engine left behind: models and updates of rounds that are over, and what killed steps began.

StreamFlow gives every job two directories of its own, named by UUIDs: one that it works in, with what it makes, and one
for its inputs, in which every transfer has a further one. It never removes any. The caller recognises its own by their
contents. Nothing else is touched: no directory of another user, no symbolic link, nothing elsewhere or deeper.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from facility.exchange.files.durable import maker_is_gone, open_directory, seconds_unchanged

ABANDONED_SECONDS = 3600.0
"""Seconds without a change after which a temporary directory without a lock counts as left by a killed process."""


def sweep_engine_directories(job_directory: Path, is_over: Callable[[Path], bool], *, known_by: str) -> list[Path]:
    """Remove the models and updates beside `job_directory` that are over; returns them.

    `known_by`: the file by which `is_over` recognises a directory. It goes last, so that one whose removal was cut
    short is still recognised. Temporary directories of `facility.exchange.files.durable` whose makers were killed go,
    too.

    Does nothing when `job_directory` is not named by a UUID: then no engine made it, and its neighbours are not ours.
    The job's own directory is left alone. Never raises for what it finds.
    """
    job_directory = Path(job_directory).resolve()
    if not is_uuid(job_directory.name):
        return []
    removed = []
    for parent in _directories(job_directory.parent):
        if not is_uuid(parent.name) or parent == job_directory:
            continue
        transfers = [directory for directory in _directories(parent) if is_uuid(directory.name)]
        gone = []
        for holder in (*transfers, parent):
            over = [one for one in _directories(holder) if is_over(one)]
            for one in over:
                _remove(one, last=known_by)
            abandoned = [one for one in _directories(holder) if _is_abandoned(one)]
            for one in abandoned:
                shutil.rmtree(one, ignore_errors=True)
            gone += over + abandoned
            if over or abandoned or (gone and holder == parent):
                _remove_if_empty(holder)
        removed += gone
    return removed


def sweep_job_directories(job_directory: Path, beside: Callable[[Path], str | None], *, known_by: str) -> list[Path]:
    """Remove directories of other jobs beside `job_directory`, with all that is in them; returns them.

    `beside`: of a job's directory, the name of its temporary one, which goes first, or '' where it is elsewhere; None
    for one that stays. `known_by`: the file by which `beside` recognises a directory; it goes last. All are named by
    UUIDs, or left alone. Never raises for what it finds.
    """
    job_directory = Path(job_directory).resolve()
    if not is_uuid(job_directory.name):
        return []
    there = {one.name: one for one in _directories(job_directory.parent) if is_uuid(one.name) and one != job_directory}
    removed = []
    for directory in list(there.values()):
        if (name := beside(directory)) is None:
            continue
        if name in there:
            shutil.rmtree(there[name], ignore_errors=True)
        _remove(directory, last=known_by)
        removed.append(directory)
    return removed


def remove_transferred(job_directory: Path, directory: Path) -> bool:
    """Remove an input that a transfer copied for this job, and that is of no use; returns whether it was one.

    Whatever is in it, since a sender may have written anything or nothing. Inputs that lie elsewhere, and symbolic
    links, by which engines hand over what is on the same machine, stay.
    """
    job_directory, directory = Path(job_directory).resolve(), Path(directory)
    transfer = directory.parent
    if not (is_uuid(job_directory.name) and is_uuid(transfer.name) and is_uuid(transfer.parent.name)):
        return False
    here = job_directory.parent / transfer.parent.name / transfer.name / directory.name
    if directory.is_symlink() or directory.resolve() != here:
        return False
    shutil.rmtree(directory, ignore_errors=True)
    _remove_if_empty(transfer)
    return True


def _remove(directory: Path, *, last: str) -> None:
    """Remove a directory, the file named `last` only once nothing else is in it."""
    with suppress(OSError):
        for name in os.listdir(directory):
            path = directory / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif name != last:
                path.unlink()
        if os.listdir(directory) in ([last], []):
            shutil.rmtree(directory, ignore_errors=True)


def _is_abandoned(directory: Path) -> bool:
    """True for a temporary directory of a process that is gone. Where a file system's locks hold on one machine alone,
    recent changes show that a process on another still uses it."""
    if not (directory.name.startswith(".") and directory.name.endswith(".tmp")):
        return False
    try:
        if seconds_unchanged(directory) < ABANDONED_SECONDS:
            return False
        with open_directory(directory) as descriptor:
            return maker_is_gone(descriptor, directory)
    except OSError:
        return False


def _remove_if_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError:
        pass


def _directories(parent: Path) -> Iterator[Path]:
    """Real directories of this user below `parent`, sorted by name."""
    try:
        entries = sorted(os.scandir(parent), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
            yield Path(entry.path)


def is_uuid(name: str) -> bool:
    """Whether an engine gave a directory this name."""
    try:
        return str(uuid.UUID(name)) == name.lower()
    except ValueError:
        return False
