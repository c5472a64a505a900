"""One run at a time: of a federation, in a work directory, and from a folder of rendered files.

Two federations may have one work directory or folder by mistake, and federation.yml may be given another name or
archive while its run is alive: the second run would remove the events and the database that the first one works with,
and the steps of the first would read the settings of the second.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import IO

from coordinator.config.federation import Federation
from facility.exchange.errors import TransientError
from facility.exchange.files import present
from facility.exchange.files.locks import take_lock

log = logging.getLogger("coordinator.engine")

RENDERED_LOCK = ".crossfed.lock"
"""In the folder of federation.yml, beside which its files are rendered."""
WORKDIR_LOCK = "run.lock"
"""Name of the lock in the work directory."""


@contextmanager
def only_one(federation: Federation) -> Iterator[int]:
    """Hold the federation's lock; yields its file descriptor. Raises `TransientError` while another run of it lives."""
    path = lock_of(federation)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as handle:
        held = f"another `crossfed run` of federation {federation.name!r} holds {path}; wait for it or stop it"
        if not _taken(handle, path, held):
            log.warning("%s cannot be locked there: let no second `crossfed run` work on this federation", path)
        yield handle.fileno()


@contextmanager
def only_run(federation: Federation) -> Iterator[tuple[int, ...]]:
    """Hold everything that a run needs for itself; yields the file descriptors, so that StreamFlow holds it too while
    it lives. Raises `TransientError` while another run has any of it."""
    workdir = federation.workdir_path
    with ExitStack() as stack:
        found = [stack.enter_context(only_one(federation)), *stack.enter_context(only_renderer(federation))]
        workdir.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = stack.enter_context(open(workdir / WORKDIR_LOCK, "a", encoding="utf-8"))
        held = (
            f"another `crossfed run` works in {workdir} (it holds {WORKDIR_LOCK} there); wait for it or stop it, or "
            "give each federation a `workdir:` of its own"
        )
        _taken(handle, workdir / WORKDIR_LOCK, held)
        yield (*found, handle.fileno())


@contextmanager
def only_renderer(federation: Federation) -> Iterator[tuple[int, ...]]:
    """Hold the folder that federation.yml lies in; yields the file descriptor, or none where nothing can be written.

    Raises `TransientError` while a run is alive that reads, in every round, what is rendered there.
    """
    folder = federation.file.parent
    try:
        handle = open(folder / RENDERED_LOCK, "a", encoding="utf-8")
    except OSError:
        yield ()
        return
    with handle:
        held = (
            f"another `crossfed run` reads what is rendered in {folder} (it holds {RENDERED_LOCK} there); wait for it "
            "or stop it, or keep each federation.yml in a folder of its own"
        )
        _taken(handle, folder / RENDERED_LOCK, held)
        yield (handle.fileno(),)


@contextmanager
def only_renderer_where_runs_are(federation: Federation) -> Iterator[None]:
    """Hold the locks of `only_one` and `only_renderer` where they exist: a command that runs nothing leaves no lock."""
    with (
        only_one(federation) if present.exists(lock_of(federation)) else nullcontext(),
        only_renderer(federation) if present.exists(federation.file.parent / RENDERED_LOCK) else nullcontext(),
    ):
        yield


def lock_of(federation: Federation) -> Path:
    return federation.archive_path.parent / f"{federation.archive_path.name}.lock"


def _taken(handle: IO[str], path: Path, held: str) -> bool:
    """Take the lock until the file is closed; False where the file system has none. Raises `TransientError`."""
    try:
        if not take_lock(handle, path, wait=False):
            raise TransientError(held)
    except OSError:
        return False
    return True
