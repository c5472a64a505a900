"""Jobs that a queue reports as running long after their time limit, or as waiting without end: taken for lost.

A queue may be broken, or lie, and no round waits for ever. No scheduler ends a job to the second, so twice the limit
and half an hour are left to it: Slurm may let a job run over (OverTimeLimit), kill and epilog take minutes (KillWait,
PBS's kill_delay), staff may extend one job, and time for which it was suspended between two questions does not count
against its limit. How long a job may wait is the user's to say (`rounds.longest_queue_hours`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol

from streamflow.core.deployment import ExecutionLocation
from streamflow.core.exception import WorkflowExecutionException
from streamflow.log_handler import logger

from coordinator.config.closing import LONGEST_QUEUE_HOURS
from coordinator.durations import format_duration
from coordinator.events.event import emit, quote_for_display
from coordinator.rounds.lost import drop_lost, write_lost
from coordinator.schedulers.scheduler import FORGOTTEN, OVERDUE, BatchScheduler, Ending, Job
from coordinator.streamflow_plugin.this_run import settings_of_run, this_round

TIMES, GRACE_SECONDS = 2, 1800.0
"""A job may run this many times its limit, and so much longer."""
GAP_SECONDS = GRACE_SECONDS
"""What counts at most of the time between two answers: a job that was requeued in a longer silence, and has its whole
limit once more, is not overdue."""
CANCEL_SECONDS = 60.0
"""How long the answer to a cancellation is waited for."""
GONE_SECONDS, LOOK_SECONDS = 600.0, 60.0
"""How long a cancelled job may stay in the queue until its facility's next job is given up, and what counts at most of
the time between two looks: the cancellation may have been lost with the connection."""

MOST_JOBS = 100
"""Jobs of one name that are waited for at once: a queue that lists ever new ones holds no round."""


class Queue(Protocol):
    """What is asked of a queue connector."""

    deployment_name: str

    @property
    def scheduler(self) -> BatchScheduler: ...

    async def shell_line(self, location: ExecutionLocation, line: str) -> tuple[str, int]:
        """Run a shell line at the login node; returns what it printed, and its code."""

    async def limit_of(self, location: ExecutionLocation) -> float:
        """Seconds that a job may run, as it asks for; 0 where nothing says, so that no job that runs is overdue."""


@dataclass(kw_only=True)
class Times:
    """What one job does in a queue, in seconds, as far as its queue's answers say so."""

    last: float
    """The time of the latest answer that counts."""
    runs: bool
    ran: float = 0.0
    """Since it was last seen to begin."""
    waited: float = 0.0
    """Without running, or in runs after which it waited again."""


class Overdue:
    """How long each job of one queue runs and waits, as far as the answers say so, and which are overdue.

    Times are the event loop's (monotonic).
    """

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        settings = settings_of_run()
        self.longest_wait = 3600 * (LONGEST_QUEUE_HOURS if settings is None else settings.longest_queue_hours)
        """Seconds; 0: no bound."""
        self._times: dict[str, Times] = {}
        self._stays: dict[str, float] = {}
        """By job that was to make way: seconds that it was seen to stay in the queue since it was cancelled."""
        self._cancelling: set[asyncio.Task[None]] = set()

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def see(self, states: Mapping[str, str], asked: float) -> None:
        """Take in the answer to a question that was put at `asked`: the answer itself may have come late.

        A job that waits again (it was requeued) or is suspended begins anew, and all that it ran counts as waiting: a
        queue that lets a job begin again and again holds a round no longer than one that never lets it begin.
        """
        for job, state in states.items():
            runs, times = self.queue.scheduler.limit_runs(state), self._times.get(job)
            if state in self.queue.scheduler.terminal or state == FORGOTTEN:
                self._times.pop(job, None)
            elif times is None:
                self._times[job] = Times(last=self.now(), runs=runs)
            else:
                passed = min(max(asked - times.last, 0.0), GAP_SECONDS)
                if runs and times.runs:
                    times.ran += passed
                else:
                    times.waited, times.ran = times.waited + times.ran + passed, 0.0
                times.last = self.now() if runs and not times.runs else max(asked, times.last)
                times.runs = runs

    async def ending(self, job: str, location: ExecutionLocation) -> Ending | None:
        """The end of a job that is taken for lost, and cancelled; None where it is not overdue."""
        if not (why := await self._why(job, location)):
            return None
        await self.cancel(job, location)
        return Ending(state=OVERDUE, code=None, detail=f"{self.queue.scheduler.title} says that it {why}")

    async def make_way(self, jobs: Iterable[Job], location: ExecutionLocation, looked: dict[str, float]) -> None:
        """Cancel those of the listed jobs that an earlier run left waiting, or that are overdue.

        `looked`: of the looks so far, when each such job was last seen; it is kept up. Raises
        `WorkflowExecutionException` where one stays in the queue all the same.
        """
        for job in jobs:
            why = await self._why(job.id, location) if job.began else "still waits"
            if not why:
                continue
            says = f"{self.queue.scheduler.title} of {self.queue.deployment_name} says that job {job.id} {why}"
            now, before = self.now(), looked.get(job.id)
            looked[job.id] = now
            if before is not None:
                self._stays[job.id] = self._stays.get(job.id, 0.0) + min(now - before, LOOK_SECONDS)
                if self._stays[job.id] > GONE_SECONDS:
                    give_up(f"{says} and was cancelled: no other job is submitted beside it")
            elif job.began:
                logger.warning(f"{says}: it is cancelled")
                emit("problem", text=f"{says}: it is cancelled")
            if before is None or not job.began:
                await self.cancel(job.id, location)

    async def _why(self, job: str, location: ExecutionLocation) -> str:
        """In what way a job is overdue; '' where it is not."""
        if (times := self._times.get(job)) is None:
            return ""
        if not times.runs:
            if not self.longest_wait or times.waited <= self.longest_wait:
                return ""
            hours = self.longest_wait / 3600
            return (
                f"still waits {format_duration(times.waited)} after it was first seen; rounds.longest_queue_hours is "
                f"{hours:g}"
            )
        if times.ran <= GRACE_SECONDS or not (limit := await self.queue.limit_of(location)):
            return ""
        if times.ran <= TIMES * limit + GRACE_SECONDS:
            return ""
        return (
            f"still runs {format_duration(times.ran)} after it was seen to begin, though it asked for "
            f"{format_duration(limit)}"
        )

    async def cancel(self, job: str, location: ExecutionLocation) -> None:
        """A facility that does not answer holds nobody up; the command itself is not cut off."""

        async def given() -> None:
            whose = f"cancelling job {job} of {self.queue.deployment_name}"
            try:
                text, code = await self.queue.shell_line(location, self.queue.scheduler.cancel_ids([job]))
                logger.info(f"{whose}: code {code} {quote_for_display(text)}".rstrip())
            except Exception as error:  # whatever it is, the round goes on
                logger.warning(f"{whose} failed: {quote_for_display(str(error))}")

        self._cancelling.add(task := asyncio.create_task(given()))
        task.add_done_callback(self._cancelling.discard)
        await asyncio.wait([task], timeout=CANCEL_SECONDS)


def note_lost(sentence: str) -> None:
    """Tell the receive step of this round why the facility left nothing."""
    if (round := this_round.get()) is not None:
        write_lost(round.workdir, round.number, round.facility, sentence)


def note_failed(sentence: str) -> str:
    """Tell the receive step of this round why a job left no update; returns that sentence."""
    note_lost(f"left no update: {sentence}")
    return sentence


def give_up(sentence: str) -> NoReturn:
    """The round has no job at this facility. Raises `WorkflowExecutionException`."""
    note_lost(sentence)
    raise WorkflowExecutionException(sentence)


def forget_lost() -> None:
    """The round has a new job at this facility."""
    if (round := this_round.get()) is not None:
        drop_lost(round.workdir, round.number, round.facility)
