"""A lock on a file: one process at a time, and one error where a file system has no locks."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO

IN_MEMORY = "/dev/shm"


def take_lock(file: int | IO[str], path: os.PathLike[str], *, wait: bool = True) -> bool:
    """Hold the lock of an open file until it is closed; False where another process holds it and `wait` is not set.

    Raises `OSError` with ENOLCK where nothing can be locked, as on Lustre that is mounted without `flock` (ENOSYS) or
    on NFS without its lock daemon.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        raise OSError(errno.ENOLCK, "its file system has no locks", os.fspath(path)) from None
    return True


def temporary_place() -> str:
    """Where temporary files go that are locked: the system's place for such, unless its file system has no locks; then
    this node's memory. An engine has TMPDIR of its jobs in their work directory."""
    places = [tempfile.gettempdir(), IN_MEMORY]
    return next((place for place in places if _has_locks(place)), places[0])


def _has_locks(place: str) -> bool:
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            return take_lock(file.fileno(), Path(place), wait=False)
    except OSError:
        return False
