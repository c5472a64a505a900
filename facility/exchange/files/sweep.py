"""Remove what the engine left behind: models and updates of rounds that are over.

StreamFlow gives every job and every transfer a directory of its own, named by a UUID, and never removes one. The
caller recognises its own by their contents. Nothing else is touched: no directory of another user, no symbolic link,
nothing elsewhere or deeper.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path


def sweep_engine_directories(job_directory: Path, is_over: Callable[[Path], bool]) -> list[Path]:
    """Remove the models and updates beside `job_directory` that are over; returns them.

    Does nothing when `job_directory` is not named by a UUID: then no engine made it, and its neighbours are not ours.
    The job's own directory is left alone. Never raises for what it finds.
    """
    job_directory = Path(job_directory).resolve()
    if not _is_uuid(job_directory.name):
        return []
    removed = []
    for parent in _directories(job_directory.parent):
        if not _is_uuid(parent.name) or parent == job_directory:
            continue
        over = [candidate for candidate in _directories(parent) if is_over(candidate)]
        for candidate in over:
            shutil.rmtree(candidate, ignore_errors=True)
        removed += over
        if over:
            _remove_if_empty(parent)
    return removed


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


def _is_uuid(name: str) -> bool:
    try:
        return str(uuid.UUID(name)) == name.lower()
    except ValueError:
        return False
