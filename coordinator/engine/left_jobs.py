"""Jobs of facilities that have left federation.yml, or are reached elsewhere now, after a run that was killed: nothing
would look for them any more.

Their queues stand in what was rendered before, and nowhere else.
"""

from __future__ import annotations

from functools import partial

import yaml
from rich.console import Console

from coordinator.archive.summary import shown
from coordinator.config.federation import Federation
from coordinator.engine.queues import Queue, at_all, read_queues, rendered_queues
from coordinator.engine.render import streamflow
from coordinator.schedulers.scheduler import Job


def cancel_left(federation: Federation, console: Console) -> None:
    """Cancel them, before federation.yml is rendered anew; a facility that does not answer holds nothing up."""
    now = {one.facility: one for one in rendered_queues(streamflow(federation), federation.file.parent)}
    left = queues_left(federation, now)
    found = at_all(left, partial(_cancel, now))
    for name, jobs in sorted(found.jobs.items()):
        for job in jobs:
            said = f"cancelled job {job.id} ({job.state}) at {name}, which {_why(federation, name)}"
            console.print(shown(said), markup=False, highlight=False)
    for sentence in found.silent:
        left = "it has left the federation or is reached elsewhere now, and jobs of it may be left in its queue"
        said = f"{sentence}; {left}"
        console.print(shown(said), markup=False, highlight=False)


def queues_left(federation: Federation, now: dict[str, Queue]) -> list[Queue]:
    """Queues that the last rendering of this federation names and that are not the facility's own `now`."""
    try:
        before = read_queues(federation.file.parent / "streamflow.yml")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
        return []  # there was no run, or the file is no longer what was rendered
    return [
        one
        for one in before
        if one.federation == federation.name and (one.facility not in now or _place(one) != _place(now[one.facility]))
    ]


def _place(queue: Queue) -> tuple[object, ...]:
    """Where a facility's jobs are looked for, and by which name."""
    login = [queue.ssh.get(key) for key in ("nodes", "username", "url", "system")]
    return (queue.kind, queue.job_name, *map(repr, login))


def _cancel(now: dict[str, Queue], queue: Queue) -> list[Job]:
    """Cancel its jobs, unless the facility's queue lists one of them now: then another login node leads to the same.

    Raises `TryAgain` where one of the two does not answer.
    """
    there = {job.id for job in queue.jobs()}
    new = now.get(queue.facility)
    if not there or new is not None and new.job_name == queue.job_name and there & {job.id for job in new.jobs()}:
        return []
    return queue.cancel()


def _why(federation: Federation, name: str) -> str:
    stays = name in {facility.name for facility in federation.facilities}
    return "is reached elsewhere now" if stays else "has left the federation"
