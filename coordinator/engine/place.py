"""A run's private directory below the federation's work directory: StreamFlow's database, temporary files, events.

Made anew for every run and removed at its end, so that two federations of one account, or of two accounts on one login
node, share nothing.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from coordinator.events.event import VARIABLE as EVENTS
from coordinator.events.follow import EventFile
from coordinator.streamflow_plugin.names import DATABASE
from facility.exchange.errors import InputError

PROBE_BYTES = 1 << 16
WORDS = {
    errno.ENOSPC: "is full: free some room",
    errno.EDQUOT: "is over its quota: free some room",
    errno.EROFS: "is mounted read-only: choose another `archive:` or `workdir:`, or have it mounted for writing",
    errno.EACCES: "cannot be written to: correct its permissions, or choose another `archive:` or `workdir:`",
}


class RunPlace:
    """The directory and what lies in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = EventFile(path / "events.jsonl")

    def environment(self) -> dict[str, str]:
        """What StreamFlow and the coordinator's steps are told."""
        return {
            DATABASE: str(self.path / "sqlite.db"),
            EVENTS: str(self.events.path),
            "TMPDIR": str(self.path / "tmp"),
        }


@contextmanager
def run_place(workdir: Path) -> Iterator[RunPlace]:
    """Make `workdir`/engine, and remove it at the end; the caller holds the federation's lock. Raises `InputError`."""
    path = workdir / "engine"
    if reason := unwritable([workdir]):
        raise InputError(reason)
    shutil.rmtree(path, ignore_errors=True)
    for folder in (path, path / "tmp"):
        folder.mkdir(mode=0o700)
    place = RunPlace(path)
    try:
        yield place
    finally:
        place.events.close()
        shutil.rmtree(path, ignore_errors=True)


def unwritable(folders: Sequence[Path]) -> str:
    """A sentence on the first folder that takes no file of 64 KiB, or ''. Folders that do not exist are made."""
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            what = WORDS.get(error.errno or 0, f"cannot be used: {error}")
            return f"{folder} {what}, then give the same command again"
    return ""
