"""Jobs that a queue reports as running long after their time limit: taken for lost, so that no round waits for ever.

A queue may be broken, or lie. No scheduler ends a job to the second, so twice the limit and half an hour are left to
it: Slurm may let a job run over (OverTimeLimit), kill and epilog take minutes (KillWait, PBS's kill_delay), staff may
extend one job, and time for which it was suspended between two questions does not count against its limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Protocol

from streamflow.core.deployment import ExecutionLocation
from streamflow.core.exception import WorkflowExecutionException
from streamflow.log_handler import logger

from coordinator.events.event import emit, quoted
from coordinator.rounds.lost import drop_lost, write_lost
from coordinator.schedulers.scheduler import OVERDUE, BatchScheduler, Ending, Job
from coordinator.streamflow_plugin.this_run import this_round

TIMES, GRACE_SECONDS = 2, 1800.0
"""A job may run this many times its limit, and so much longer."""
GAP_SECONDS = GRACE_SECONDS
"""What counts at most of the time between two answers: a job that was requeued in a longer silence, and has its whole
limit once more, is not overdue."""
CANCEL_SECONDS = 60.0
"""How long the answer to a cancellation is waited for."""
GONE_SECONDS = 600.0
"""How long a cancelled job may stay in the queue until its facility's next job is given up."""


class Queue(Protocol):
    """What is asked of a queue connector."""

    deployment_name: str

    @property
    def scheduler(self) -> BatchScheduler: ...

    async def shell_line(self, location: ExecutionLocation, line: str) -> tuple[str, int]:
        """Run a shell line at the login node; returns what it printed, and its code."""

    def limit_of(self, location: ExecutionLocation) -> float:
        """Seconds that a job may run, as it asks for; 0 where nothing here says, so that no job is overdue."""


class Overdue:
    """Of one queue: how long each job runs, as far as its answers say so, and which of them are overdue.

    Times are the event loop's (monotonic).
    """

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._ran: dict[str, tuple[float, float]] = {}
        """By job: seconds that it was seen to run, and the time of the latest answer that counts."""
        self._cancelled: dict[str, float] = {}
        """When each overdue job was first cancelled."""
        self._cancelling: set[asyncio.Task[None]] = set()

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def see(self, states: Mapping[str, str], asked: float) -> None:
        """Take in the answer to a question that was put at `asked`: the answer itself may have come late.

        A job that waits again (it was requeued) or is suspended begins anew.
        """
        for job, state in states.items():
            if not self.queue.scheduler.limit_runs(state):
                self._ran.pop(job, None)
            elif job not in self._ran:
                self._ran[job] = 0.0, self.now()
            else:
                ran, last = self._ran[job]
                self._ran[job] = ran + min(max(asked - last, 0.0), GAP_SECONDS), max(asked, last)

    async def ending(self, job: str, location: ExecutionLocation) -> Ending | None:
        """The end of a job that is taken for lost, and cancelled; None where it is not overdue."""
        if not (why := self._why(job, location)):
            return None
        await self.cancel(job, location)
        return Ending(state=OVERDUE, code=None, detail=f"{self.queue.scheduler.title} says that it {why}")

    async def make_way(self, jobs: Iterable[Job], location: ExecutionLocation, reported: set[str]) -> None:
        """Cancel those of the listed jobs that are overdue, once for each `reported`, which are added to.

        Raises `WorkflowExecutionException` where one was cancelled long ago and is still there.
        """
        for job in jobs:
            if not (why := self._why(job.id, location)):
                continue
            says = f"{self.queue.scheduler.title} of {self.queue.deployment_name} says that job {job.id} {why}"
            if job.id not in reported:
                reported.add(job.id)
                logger.warning(f"{says}: it is cancelled")
                emit("problem", text=f"{says}: it is cancelled")
                await self.cancel(job.id, location)
            if self.now() - self._cancelled[job.id] > GONE_SECONDS:
                why = f"{says} and was cancelled: no other job is submitted beside it"
                note_lost(why)
                raise WorkflowExecutionException(why)

    def _why(self, job: str, location: ExecutionLocation) -> str:
        ran, _ = self._ran.get(job, (0.0, 0.0))
        if ran <= GRACE_SECONDS or not (limit := self.queue.limit_of(location)):
            return ""
        if ran <= TIMES * limit + GRACE_SECONDS:
            return ""
        return f"still runs {_clock(ran)} after it was seen to begin, though it asked for {_clock(limit)}"

    async def cancel(self, job: str, location: ExecutionLocation) -> None:
        """A facility that does not answer holds nobody up; the command itself is not cut off."""
        self._cancelled.setdefault(job, self.now())

        async def given() -> None:
            whose = f"cancelling job {job} of {self.queue.deployment_name}"
            try:
                text, code = await self.queue.shell_line(location, self.queue.scheduler.cancel_ids([job]))
                logger.info(f"{whose}: code {code} {quoted(text)}".rstrip())
            except Exception as error:  # whatever it is, the round goes on
                logger.warning(f"{whose} failed: {quoted(str(error))}")

        self._cancelling.add(task := asyncio.create_task(given()))
        task.add_done_callback(self._cancelling.discard)
        await asyncio.wait([task], timeout=CANCEL_SECONDS)


def note_lost(sentence: str) -> None:
    """Tell the receive step of this round why the facility left nothing."""
    if (round := this_round.get()) is not None:
        write_lost(round.workdir, round.number, round.facility, sentence)


def forget_lost() -> None:
    """The round has a new job at this facility."""
    if (round := this_round.get()) is not None:
        drop_lost(round.workdir, round.number, round.facility)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
