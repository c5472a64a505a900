"""Models of jobs that are not over: no request alters them.

A job compares the signed manifest as it begins, and its ranks read the model's files after that, minutes later or in
several places. Behind a gate nobody but the coordinator's requests can exchange them in between.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from facility.gating import queue
from facility.gating.confine import below
from facility.gating.ledger import RESERVED, RESERVED_SECONDS, JobEntry, changed, read_ledger
from facility.gating.refusal import Refused
from facility.gating.session import Session

MOST_LINKS = 100
"""In a model: the ledger holds where they lead, and is written for all that leaves."""


def places_of(model: Path) -> list[str]:
    """What a job reads of a model: its directory, and the files elsewhere that links in it lead to.

    Raises `Refused` for more than `MOST_LINKS` of them.
    """
    found = [str(model)]
    for folder, directories, files in os.walk(model):
        found += [os.path.realpath(one) for name in [*directories, *files] if os.path.islink(one := f"{folder}/{name}")]
        if len(found) > MOST_LINKS:
            raise Refused(f"the model holds more than {MOST_LINKS} links, expected files")
    return found


def writable(word: str, session: Session) -> Path:
    """A path below the workdir that may be written or removed. Raises `Refused` where a job reads a model there."""
    path = below(word, session.workdir)
    if _held(path, read_ledger(session.ledger).jobs) is None:
        return path
    _note_ends(session)
    if (job := _held(path, read_ledger(session.ledger).jobs)) is not None:
        raise Refused(f"{path} is, holds or lies in the model of job {job.id}, which is not over: it stays as it is")
    return path


def _held(path: Path, jobs: Iterable[JobEntry]) -> JobEntry | None:
    """The job that has not ended and reads there."""
    for job in jobs:
        if job.id and not job.ended:
            for place in map(Path, job.reads):
                if path == place or path.is_relative_to(place) or place.is_relative_to(path):
                    return job
    return None


def _note_ends(session: Session) -> None:
    """Note which jobs are over, on a host without a queue by its processes. Those that a gate was about to submit, or
    to run, when it was killed are over once nothing of their name is left."""
    queue.note_ends(session)
    for name in session.names():
        if session.policy.scheduler == "ssh":
            there = bool(queue.processes(name))
        else:
            code, ids, _ = queue.ids_of(session, queue.table(session).active, name)
            there = bool(code or ids)
        if there:
            continue
        with changed(session.ledger) as (ledger, now):
            for job in ledger.jobs:
                begun = job.id.startswith(RESERVED) and now - job.submitted > RESERVED_SECONDS
                if job.name == name and begun and not job.ended:
                    job.ended = now
