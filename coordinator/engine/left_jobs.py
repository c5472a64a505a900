"""Jobs that a run which was killed left, and that are of no use any more.

Those of facilities that have left federation.yml, or are reached elsewhere now: nothing would look for them, and their
queues stand in what was rendered before, of which the latest run keeps a copy (`remember_queues`). And those of rounds
that `crossfed rewind` set aside: the next job of their facility would wait for their end, for an update of a model that
is no more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import yaml
from rich.console import Console

from coordinator.archive.rewind import CANCELLED
from coordinator.archive.rounds import REWOUND, Archive
from coordinator.config.federation import Federation
from coordinator.engine.queues import Answers, Queue, at_all, read_queues, rendered_queues
from coordinator.engine.render import streamflow_file
from coordinator.rounds.late import WORKDIR, remembered_job
from coordinator.schedulers.scheduler import Job
from coordinator.shown_text import safe_line
from facility.exchange.files.durable import write_text

RENDERED = "streamflow.yml"
"""Name of the rendered file beside federation.yml, which names the jobs."""
QUEUES = "queues.yml"
"""In the work directory: a copy of it, of the latest run."""


def cancel_left(federation: Federation, console: Console) -> None:
    """Cancel jobs of facilities that have left or are reached elsewhere, before federation.yml is rendered anew.

    A facility that does not answer holds nothing up.
    """
    now = {one.facility: one for one in rendered_queues(streamflow_file(federation), federation.file.parent)}
    _print_left(
        at_all(queues_left(federation, now), partial(_cancel, now)),
        console,
        cancelled=lambda name: f"which {_why(federation, name)}",
        silent="it has left the federation or is reached elsewhere now, and jobs of it may be left in its queue",
    )


def cancel_set_aside(federation: Federation, archive: Archive, console: Console) -> None:
    """The first time after a rewind, cancel the jobs of rounds that it set aside.

    A late job whose update the rounds to come may still use stays.
    """
    note = archive.read_note(REWOUND)
    number = len(archive.rounds())
    if note.get("round") != number or note.get(CANCELLED, True):
        return
    # Before there is a new job, which would be taken for an old one.
    archive.write_note(REWOUND, note | {CANCELLED: True})
    staying = {facility.name for facility in federation.facilities}
    late = {name: remembered_job(federation.workdir_path / WORKDIR, name) for name in staying}
    of_use = {name for name, job in late.items() if job is not None and job.round <= number}
    _print_left(
        at_all([one for one in _queues_before(federation) if one.facility in staying - of_use], Queue.cancel),
        console,
        cancelled=lambda name: "of a round that crossfed rewind set aside",
        silent="a job of a round that was set aside may be at work there, and is waited for",
    )


def remember_queues(federation: Federation) -> None:
    """Keep what is rendered now in the work directory: `crossfed render` may replace it before the next run."""
    write_text(federation.workdir_path / QUEUES, (federation.file.parent / RENDERED).read_text(encoding="utf-8"))


def queues_left(federation: Federation, now: dict[str, Queue]) -> list[Queue]:
    """Queues that this federation had before and that are not the facility's own `now`."""
    return [
        one for one in _queues_before(federation) if one.facility not in now or _place(one) != _place(now[one.facility])
    ]


def _queues_before(federation: Federation) -> list[Queue]:
    """Queues of this federation that the last rendering and that of the latest run name, each once."""
    folder = federation.file.parent
    found: dict[tuple[object, ...], Queue] = {}
    for path in (federation.workdir_path / QUEUES, folder / RENDERED):
        try:
            before = read_queues(path, folder=folder)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
            continue  # there was no run, or the file is no longer what was rendered
        found |= {(one.facility, _place(one)): one for one in before if one.federation == federation.name}
    return list(found.values())


def _place(queue: Queue) -> tuple[object, ...]:
    """Where a facility's jobs are looked for, and by which name."""
    login = [queue.ssh.get(key) for key in ("nodes", "username", "url", "system")]
    return (queue.kind, queue.job_name, *map(repr, login))


def _cancel(now: dict[str, Queue], queue: Queue) -> list[Job]:
    """Cancel its jobs, unless the facility's queue lists one of them now: then another login node leads to the same.

    Raises `TransientError` where one of the two does not answer.
    """
    there = {job.id for job in queue.jobs()}
    new = now.get(queue.facility)
    if not there or new is not None and new.job_name == queue.job_name and there & {job.id for job in new.jobs()}:
        return []
    return queue.cancel()


def _why(federation: Federation, name: str) -> str:
    stays = name in {facility.name for facility in federation.facilities}
    return "is reached elsewhere now" if stays else "has left the federation"


def _print_left(found: Answers, console: Console, *, cancelled: Callable[[str], str], silent: str) -> None:
    """Print each job that was cancelled, and each facility that did not answer."""
    lines = [
        f"cancelled job {job.id} ({job.state}) at {name}, {cancelled(name)}"
        for name, jobs in sorted(found.jobs.items())
        for job in jobs
    ]
    for said in [*lines, *(f"{sentence}; {silent}" for sentence in found.silent)]:
        console.print(safe_line(said), markup=False, highlight=False)
