"""Detects jobs that will never start: what the scheduler's reason means, what to do, and when a round is given up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from coordinator.archive.many import group_for_display, kind_of, names_of
from coordinator.durations import format_duration
from coordinator.engine.queues import Queue, at_all
from coordinator.schedulers.scheduler import Job
from facility.exchange.text import number_of

log = logging.getLogger("coordinator.engine")


def current_jobs(queues: list[Queue]) -> list[dict[str, str]]:
    """Our current jobs by facility, with what to do; a facility that does not answer is one entry too."""
    found: list[dict[str, str]] = []

    def ask(queue: Queue) -> list[Job]:
        jobs = queue.jobs()
        for job in jobs:
            advice = queue.scheduler.what_to_do(job)
            found.append(
                {
                    "facility": queue.facility,
                    "job": job.id,
                    "state": job.state,
                    "reason": job.reason,
                    "do": advice and f"-> {advice}",
                }
            )
        return jobs

    silent = at_all(queues, ask).silent
    found.sort(key=lambda entry: (entry["facility"], entry["job"]))
    return [*found, *({"facility": "", "job": "", "state": "", "reason": sentence, "do": ""} for sentence in silent)]


def lines_of(found: Sequence[Mapping[str, str]]) -> list[str]:
    """The entries of `current_jobs` as text; of many jobs, one line for all that wait for the same."""
    lines = []
    for jobs in group_for_display(
        found, lambda job: (job["state"], kind_of(job["reason"], job["facility"]), job["do"])
    ):
        first = " ".join(filter(None, jobs[0].values()))
        names = names_of([job["facility"] for job in jobs[1:]])
        lines.append(f"{first} (and {number_of(len(jobs) - 1, 'more job')} alike: {names})" if names else first)
    return lines


END_SECONDS = 5.0
MOST_RESTS = 15
"""Looks after which a facility that does not answer is asked again."""


@dataclass(kw_only=True)
class Watch:
    """Polls the queues; reports a stuck job once per reason, and cancels it after the queue's limit."""

    queues: list[Queue]
    stuck: Callable[[str, str, str, str], None] = lambda facility, job, reason, advice: None
    """Gets facility, job, reason and advice of each stuck job, once."""
    away: Callable[[str, str], object] = lambda facility, sentence: None
    """Gets a facility whose login node does not answer and a sentence on it, at every look. The engine's own connection
    notices a link that swallows everything only after ten minutes (`connection.ALIVE_COUNT`)."""
    back: Callable[[str], object] = lambda facility: None
    """Gets each facility that answers, at every look."""
    every_seconds: float = 60.0
    clock: Callable[[], float] = time.monotonic
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    _told: set[tuple[str, str, str]] = field(default_factory=set)
    _silences: dict[str, int] = field(default_factory=dict)
    """How often each facility did not answer, one look after the other."""
    _rests: dict[str, int] = field(default_factory=dict)
    """Looks that leave it out."""

    def look(self) -> None:
        """Ask every queue once. A facility that does not answer is asked ever more rarely: each question is a login,
        and sites lock out addresses whose logins fail often."""
        asked = []
        for queue in (one for one in self.queues if one.scheduler.advice):
            if (rest := self._rests.get(queue.facility, 0)) > 0:
                self._rests[queue.facility] = rest - 1
            else:
                asked.append(queue)
        found = at_all(asked, self._one)
        for queue in asked:
            silences = 0 if queue.facility in found.jobs else self._silences.get(queue.facility, 0) + 1
            self._silences[queue.facility] = silences
            self._rests[queue.facility] = min(2**silences - 1, MOST_RESTS)
        found.report_away(asked, self.away, self.back)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Look every so often until the block ends, which then waits a little for a look under way.

        One that takes longer holds no run up; its session at the facility ends with its answer, or with this process.
        """
        end = threading.Event()

        def work() -> None:
            while not end.wait(self.every_seconds):
                self.look()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join(END_SECONDS)

    def _one(self, queue: Queue) -> list[Job]:
        jobs = queue.jobs()
        for job in jobs:
            key = (queue.facility, job.id)
            if not (advice := queue.scheduler.what_to_do(job)):
                self._since.pop(key, None)
                continue
            since = self._since.setdefault(key, self.clock())
            limit = queue.patience_seconds
            if (*key, job.reason) not in self._told:
                self._told.add((*key, job.reason))
                end = f"; without that its round is given up {format_duration(limit)} after this" if limit else ""
                self.stuck(queue.facility, job.id, job.reason, advice)
                log.warning(
                    "%s: job %s will not begin by itself (%s): %s%s", queue.facility, job.id, job.reason, advice, end
                )
            if limit and self.clock() - since >= limit:
                queue.cancel(waiting_only=True)
                self._since.pop(key, None)
                log.warning(
                    "%s: job %s waited %s with %s: cancelled, the round goes on without it",
                    queue.facility,
                    job.id,
                    format_duration(limit),
                    job.reason,
                )
        return jobs
