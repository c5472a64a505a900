"""A job that is in a facility's queue ahead of its model, as its queue connector keeps it: one at a time.

    none -> placed (queued, then waiting in the job) -> handed over: a round's job like any other
                                                     -> ended without a round -> none, or placed again

One file in a directory made for the job decides (`facility.exchange.messages.ahead`): a round is handed over or not,
whatever becomes of the connection or of this process. A job that has a round is never handed another, and a
facility whose job cannot take a round gets a job as always.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import posixpath
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from streamflow.core.deployment import ExecutionLocation
from streamflow.log_handler import logger

from coordinator.config.ahead import AheadSettings
from coordinator.events.event import emit
from coordinator.rounds.ahead import (
    Placeholder,
    forget_placeholder,
    read_seen,
    remember_placeholder,
    remembered_placeholder,
    waited_sentence,
    write_seen,
)
from coordinator.rounds.ahead_time import when_to_submit
from coordinator.schedulers.scheduler import BatchScheduler, Job
from coordinator.streamflow_plugin.handing_over import ByGate, ByShell, Lines, Submission
from coordinator.streamflow_plugin.this_run import RoundAtFacility
from facility.exchange.errors import ManifestError
from facility.exchange.job_names import waiting_name
from facility.exchange.messages.ahead import Waited, read_waited

SLACK_SECONDS = 60.0
"""Beyond the wait that a job was asked for: its last look, a signal, a slow file system."""
MOST_PLACEHOLDERS = 20
"""For one round: jobs that each end without it."""


class Queue(Lines, Protocol):
    """What a placeholder needs of its queue connector."""

    deployment_name: str
    pollingInterval: int

    @property
    def scheduler(self) -> BatchScheduler: ...

    async def states_of(self, ids: list[str], location: ExecutionLocation) -> dict[str, str]: ...

    async def placeholders(self, location: ExecutionLocation) -> list[Job]:
        """Jobs in the queue under the name of placeholders."""

    async def make_way_ahead(self, location: ExecutionLocation, spare: str = "") -> None:
        """Cancel those that have not begun and wait for the end of the others, but for the job `spare`."""

    async def submit_ahead(self, one: Submission, location: ExecutionLocation) -> str:
        """Submit it in the facility's job template, under the name of placeholders; returns the job's id."""

    def template_of(self, location: ExecutionLocation) -> str:
        """The job template with nothing in it."""

    def nodes_of(self, location: ExecutionLocation) -> int:
        """Nodes that a job asks for; 0 where nothing here says."""


@dataclass(kw_only=True)
class RoundJob:
    """The facility's job of the round under way."""

    id: str
    submitted: float
    """When it was submitted or given its round."""
    placeholder: Placeholder | None = None
    """What it was before."""
    worked: float = 0.0
    """Since when it is at work, as far as was seen; 0: not yet."""
    began: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Ahead:
    """The placeholder jobs of one facility in one run: when to submit the next, and what becomes of it."""

    def __init__(
        self,
        queue: Queue,
        *,
        facility: str,
        workdir: Path,
        settings: AheadSettings | None,
        rounds: int,
        clock: Callable[[], float] = time.time,
        reach: ByShell | ByGate | None = None,
    ) -> None:
        """`settings`: None, no job is submitted ahead; `rounds`: that have a job, the final evaluation included;
        `reach`: how jobs that wait are reached, by a shell unless said otherwise."""
        self.queue, self.facility, self.workdir = queue, facility, workdir
        self.reach = reach or ByShell(queue)
        self.settings, self.rounds, self.clock = settings, rounds, clock
        self.placeholder: Placeholder | None = None
        self.seen = read_seen(workdir, facility)
        self._job: RoundJob | None = None
        self._taken: Placeholder | None = None
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        """Held while the login node is asked: what is asked is never cut off in the middle."""
        self._cleared = False
        self._told = ""
        self._fails = False
        """A placeholder ended without saying that it had waited: no further one in this run."""

    async def take(self, one: Submission, location: ExecutionLocation) -> str | None:
        """The id of the job that now runs `one`, or None where it must be submitted."""
        async with self._lock:
            self._stop()
            if not self._cleared:
                await self._clear(location)
                self._cleared = True
            found, self._taken = self.placeholder, None
            if found is None or await self._has_ended(found, location):
                return None
            handed = await self.reach.hand(found, one.command, location)
            self._forget()
            if not handed:  # it has decided to end, or an earlier run gave it a round
                await self.queue.make_way_ahead(location)
                await self._count(found, location, until=self.clock())
                return None
            self._taken = found
            logger.info(f"job {found.job} of {self.queue.deployment_name}, submitted ahead, is given its round")
            return found.job

    def follow(self, job_id: str, one: Submission, location: ExecutionLocation, round: RoundAtFacility) -> None:
        """The round's job is in the queue: prepare the next one's."""
        now = self.clock()
        before, self._job = self._job, RoundJob(id=job_id, submitted=now, placeholder=self._taken)
        self._taken = None
        if before is not None and before.worked:
            self._learn(self.seen.with_span(now - before.worked))
        if self.settings is not None and round.number + 1 < self.rounds and not self._fails:
            self._stop()
            self._task = asyncio.create_task(self._prepare(self._job, one, location))

    def job_began(self, job_id: str) -> None:
        """A job of the queue is at work."""
        job = self._job
        if job is None or job.id != job_id or job.worked:
            return
        job.worked = self.clock()
        job.began.set()
        if job.placeholder is None:
            self._learn(self.seen.with_wait(job.worked - job.submitted))

    async def job_ended(self, job_id: str, location: ExecutionLocation) -> None:
        """A job of the queue has ended; reads how long it had waited for its model."""
        job = self._job
        if job is None or job.id != job_id:
            return
        now = self.clock()
        if job.worked:
            self._learn(self.seen.with_run(now - job.worked))
        job.ended.set()
        if job.placeholder is not None:
            await self._count(job.placeholder, location, until=job.worked or now, handed=job.submitted)

    async def drop(self, location: ExecutionLocation) -> None:
        """The run ends: no job is to stay in the queue without a round."""
        self._stop()
        if (found := self.placeholder) is not None and found.job:
            await self.queue.shell_line(location, self.queue.scheduler.cancel_ids([found.job]))
            self._forget()

    async def _prepare(self, job: RoundJob, one: Submission, location: ExecutionLocation) -> None:
        """Submit the next job at the right moment, and again where it ends too early and the user wants that."""
        assert self.settings is not None
        try:
            await _first_of(job.began, job.ended)
            choice = when_to_submit(self.seen, wait=self.settings.wait, idle=self.settings.idle)
            if choice.reason != self._told:
                self._told = choice.reason
                logger.info(f"{self.facility}'s next job is submitted ahead {choice.reason}")
            if choice.after is None:
                return
            if math.isfinite(choice.after):  # also after this job's end: its facility may wait long for the others
                await asyncio.sleep(max(0.0, (job.worked or self.clock()) + choice.after - self.clock()))
            else:
                await job.ended.wait()
            for _ in range(MOST_PLACEHOLDERS):
                await self._place(one, location)
                await self._until_it_ends(location)
                if self.settings.then == "leave" or self._fails:
                    return
        except Exception as error:  # the next job is then submitted with its model
            logger.warning(f"no job of {self.facility} is submitted ahead now: {error}")

    async def _place(self, one: Submission, location: ExecutionLocation) -> None:
        """Put a placeholder into the queue. It is remembered before anything of it can be there."""
        assert self.settings is not None
        async with self._lock:
            directory = self.reach.place(one)
            self._remember(Placeholder(directory=directory, template=self._template(location), placed=self.clock()))
            await self.reach.prepare(directory, location)
            placed = self.reach.waiting(one, directory, self.settings.wait)
            try:
                job_id = await self.queue.submit_ahead(replace(placed, job_name=waiting_name(one.job_name)), location)
            except Exception:
                self._forget()  # if it is there all the same, its name finds it
                raise
            assert self.placeholder is not None
            self._remember(replace(self.placeholder, job=job_id))
            emit("ahead", step=posixpath.dirname(one.job_name), job=job_id)
            logger.info(f"job {job_id} of {self.queue.deployment_name} is in the queue ahead of its model")

    async def _until_it_ends(self, location: ExecutionLocation) -> None:
        """Return once the placeholder has ended without a round."""
        while True:
            await asyncio.sleep(max(1, self.queue.pollingInterval))
            async with self._lock:
                if self.placeholder is None or await self._has_ended(self.placeholder, location):
                    return

    async def _has_ended(self, found: Placeholder, location: ExecutionLocation) -> bool:
        """Whether it has, as the scheduler says; it is then accounted for and forgotten."""
        states = await self.queue.states_of([found.job], location)
        if not self.queue.scheduler.ended(states, [found.job]):
            return False
        self._forget()
        waited = await self._count(found, location, until=self.clock())
        if waited is None:
            self._fails = True
            logger.warning(
                f"job {found.job} of {self.queue.deployment_name}, submitted ahead, has ended without waiting for its "
                f"model: cancelled there, or CrossFed at the facility is of an earlier version (`crossfed check`); its "
                f"output is in {found.directory}. No further one is submitted ahead in this run"
            )
        return True

    async def _clear(self, location: ExecutionLocation) -> None:
        """Find what an earlier run left: a placeholder that still waits is used, anything else makes way."""
        found = remembered_placeholder(self.workdir, self.facility)
        if self.settings is None and found is None:
            return
        there = await self.queue.placeholders(location)
        own = [one for one in there if found and one.id == (found.job or there[0].id)]
        usable = self.settings is not None and found is not None and found.template == self._template(location)
        if found is not None and usable and own and (found.job or len(there) == 1):
            self.placeholder = replace(found, job=own[0].id)
            await self.queue.make_way_ahead(location, spare=own[0].id)
            return
        await self.queue.make_way_ahead(location)
        self._forget()
        if found is not None and found.job:
            await self._count(found, location, until=self.clock())

    async def _count(
        self, found: Placeholder, location: ExecutionLocation, *, until: float, handed: float = 0.0
    ) -> Waited | None:
        """Report how long a job waited for its model, as it wrote; None where it wrote nothing.

        `until`: when it was first seen at work, or had ended; `handed`: when it was given its round.
        """
        text = await self.reach.waited(found, location)
        try:
            waited = read_waited(text) if text else None
        except ManifestError as error:
            logger.warning(f"{self.facility}: {error}")
            return None
        if waited is None:
            return None
        if waited.seconds > (most := self._longest_wait(found)):
            logger.warning(
                f"{self.facility} says that job {found.job} waited {waited.seconds:.0f} s; it was {most:.0f} s at "
                "most, which count"
            )
            waited = replace(waited, seconds=most)
        if 0 < (nodes := self.queue.nodes_of(location)) < waited.nodes:
            logger.warning(
                f"{self.facility} says that job {found.job} has {waited.nodes} nodes; it asked for {nodes}, which count"
            )
            waited = replace(waited, nodes=nodes)
        if until - waited.seconds < handed:
            until = handed  # it was at work before it had its round
        self._learn(self.seen.with_wait(until - waited.seconds - found.placed).with_lost(waited.seconds))
        emit(
            "waited",
            facility=self.facility,
            job=found.job,
            seconds=waited.seconds,
            nodes=waited.nodes,
            handed=waited.handed,
            until=until,
        )
        logger.log(
            logging.INFO if waited.handed else logging.WARNING, waited_sentence(waited, self.facility, found.job)
        )
        return waited

    def _longest_wait(self, found: Placeholder) -> float:
        """Seconds that a job can have waited: as long as it was asked to, or as it has been in the queue."""
        asked = self.settings.wait + SLACK_SECONDS if self.settings is not None else 0.0
        return max(asked, self.clock() - found.placed, 0.0)

    def _template(self, location: ExecutionLocation) -> str:
        return hashlib.sha256(self.queue.template_of(location).encode()).hexdigest()

    def _remember(self, found: Placeholder) -> None:
        self.placeholder = found
        remember_placeholder(self.workdir, self.facility, found)

    def _forget(self) -> None:
        self.placeholder = None
        forget_placeholder(self.workdir, self.facility)

    def _learn(self, seen: Any) -> None:
        self.seen = seen
        write_seen(self.workdir, self.facility, seen)

    def _stop(self) -> None:
        """Submit no further one for this round."""
        if self._task is not None:
            self._task.cancel()
            self._task = None


async def _first_of(*events: asyncio.Event) -> None:
    """Until one of the events is set."""
    waits = [asyncio.ensure_future(one.wait()) for one in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waits:
            one.cancel()
