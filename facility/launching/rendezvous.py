"""The private directory in which the ranks of one start of a job meet (`facility.training.processes.rendezvous`)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from facility.exchange.files.durable import scratch_directory, write_bytes
from facility.exchange.files.locks import temporary_place
from facility.launching.notes import Notes
from facility.launching.place import Tasks
from facility.launching.tables import TORCHRUN

DIRECTORY = "CROSSFED_RENDEZVOUS"
"""Environment variable: a directory with mode 0700 of the user, made for this start of this job."""
SECRET = "secret"
"""File in it, mode 0600: random bytes that every rank must know; absent where all ranks have one launcher."""
SECRET_BYTES = 32


@contextmanager
def private_directory(tasks: Tasks, notes: Notes, seconds: float) -> Iterator[dict[str, str]]:
    """The environment that holds where ranks meet; the directory or its secret is gone afterwards.

    One launcher: a directory on this node. Several: one below `notes`, which all nodes see, with a secret that the
    first task writes and the others wait for, `seconds` at most.
    """
    if tasks.scheduler == TORCHRUN.name:
        yield {}
        return
    if tasks.tasks == 1:
        with scratch_directory(Path(temporary_place()) / "crossfed-meeting") as alone:  # torch locks its store there
            yield {DIRECTORY: str(alone)}
        return
    shared = notes.directory / "rendezvous"
    if tasks.first:
        shared.mkdir(mode=0o700, parents=True, exist_ok=True)
        shared.chmod(0o700)
        write_bytes(shared / SECRET, secrets.token_bytes(SECRET_BYTES), mode=0o600)
        notes.write("rendezvous", True)
    else:
        notes.wait_for("rendezvous", seconds, "the first task")
    try:
        yield {DIRECTORY: str(shared)}
    finally:
        if tasks.first:
            (shared / SECRET).unlink(missing_ok=True)
