"""A run's private directory below the federation's work directory: StreamFlow's database, temporary files, events.

Created for every run and removed at its end, so that two federations of one account, or of two accounts on one login
node, share nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.events.event import VARIABLE as EVENTS
from coordinator.events.follow import EventFile
from coordinator.streamflow_plugin.names import DATABASE
from facility.exchange.errors import InputError
from facility.exchange.files.storage import why_unwritable


class RunPlace:
    """The directory and its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = EventFile(path / "events.jsonl")

    def environment(self) -> dict[str, str]:
        """What StreamFlow and the coordinator's steps inherit."""
        return {
            DATABASE: str(self.path / "sqlite.db"),
            EVENTS: str(self.events.path),
            "TMPDIR": str(self.path / "tmp"),
        }


@contextmanager
def run_place(workdir: Path) -> Iterator[RunPlace]:
    """Make `workdir`/engine, and remove it at the end; the caller holds the federation's lock. Raises `InputError`."""
    path = workdir / "engine"
    if reason := why_unwritable([workdir]):
        raise InputError(reason)
    shutil.rmtree(path, ignore_errors=True)
    try:
        for folder in (path, path / "tmp"):
            folder.mkdir(mode=0o700)
        place = RunPlace(path)
    except OSError as error:
        raise InputError(
            f"{path}, the engine's own directory, cannot be made ({error.strerror}): remove what is there, or choose "
            "another `workdir:`, then give the same command again"
        ) from None
    try:
        yield place
    finally:
        place.events.close()
        shutil.rmtree(path, ignore_errors=True)


def login_place(workdir: Path) -> Path:
    """Directory by which a waiting run sees that a login has been renewed."""
    return workdir / "logins"
