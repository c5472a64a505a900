"""Rounds that close without waiting for all: a facility's step ends when its job does, or when its round closes.

The job of a facility that is late goes on in its queue. Its step yields nothing, so the round is averaged without it;
in the next round the facility gets no new job: its step waits for the one that runs, and hands on what that leaves, an
update of an earlier round. A round waits for an update that would be too late to count in the next (bounded staleness:
Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", section 3), and is
open to all others until then; the last round and the final evaluation wait for all jobs: no update is lost.

A facility that cannot be reached has no job and so nothing to lose: no round waits for it longer than the grace, and
it begins a later round from the newest model.

What the engine does not distinguish is decided here, inside `streamflow run`, for every kind of connector alike. Late
jobs are remembered on disk (`coordinator.rounds.late`): a run that is killed finds them again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamflow.core.workflow import Status
from streamflow.log_handler import logger

from coordinator.archive.rounds import BUSY, CARRIED, DISCARDED, UNREACHED, Wait
from coordinator.config.closing import ClosingSettings
from coordinator.events.event import emit
from coordinator.rounds.late import (
    LateJob,
    add_time,
    discounted,
    drop_late,
    forget_job,
    handed_on,
    read_times,
    remember_job,
    remembered_job,
    write_late,
    write_times,
    write_wait,
)
from coordinator.rounds.lost import move_lost
from coordinator.streamflow_plugin.errand import Errand, Work
from coordinator.streamflow_plugin.grace import best_grace, closes_after, usual_quorum
from coordinator.streamflow_plugin.problems import ROUND, report_away, report_back, report_problem
from coordinator.streamflow_plugin.this_run import settings_of_run

INPUT = "round"
"""Port of cwl/tools/train.cwl that holds the round's number."""
PAUSE_SECONDS = 60.0
"""Between two tries to reach one."""
KEPT_TIMES = 16
"""Rounds whose times are kept."""


def latest(times: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Times of the last `KEPT_TIMES` rounds."""
    return times if len(times) <= KEPT_TIMES else {number: times[number] for number in sorted(times)[-KEPT_TIMES:]}


def now() -> float:
    """Seconds on the clock of the event loop, which its timers follow."""
    return asyncio.get_running_loop().time()


@dataclass(kw_only=True)
class Gate:
    """Whether one attempt at a round has closed."""

    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """The grace is over, and nothing is waited for that no later round could use."""
    closed_to_unreached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: float = field(default_factory=now)
    delivered: set[str] = field(default_factory=set)
    discounted: set[str] = field(default_factory=set)
    """Facilities that make no quorum: what they delivered in an earlier attempt was refused."""
    begun: set[str] = field(default_factory=set)
    at_work: dict[str, Work] = field(default_factory=dict)
    """By facility, what has begun and not ended."""
    waited_for: set[str] = field(default_factory=set)
    """Facilities whose job no later round could use."""
    grace_over: bool = False

    def close(self) -> None:
        """Close after the grace; not before all that is waited for has ended."""
        self.grace_over = True
        if not self.waited_for:
            self.closed.set()

    def wait_for(self, facility: str, waits: bool) -> None:
        """Whether the round waits for a facility's job."""
        (self.waited_for.add if waits else self.waited_for.discard)(facility)
        if self.grace_over:
            self.close()

    @property
    def waits_for_unreached(self) -> bool:
        """Whether all that is left are facilities without a job, for they cannot be reached."""
        left = self.at_work.values()
        return bool(left) and not any(work.reached.is_set() or work.busy for work in left)


class Closing:
    """Decides when the rounds of one run of the engine close, and takes over jobs that are late."""

    pause_seconds = PAUSE_SECONDS

    def __init__(
        self,
        settings: ClosingSettings,
        *,
        rounds: int,
        facilities: int,
        most_late: int,
        exponent: float = 0.5,
        fewest: int = 1,
    ) -> None:
        """`most_late`: rounds that an update may be late and still count; `exponent`: of what late ones are worth;
        `fewest`: updates without which no model is made."""
        self.settings, self.rounds, self.facilities, self.fewest = settings, rounds, facilities, fewest
        self.quorum, self.most_late, self.exponent = settings.needed(facilities), most_late, exponent
        self._carries = settings.late == "carry"
        self._workdir: Path | None = None
        self._gates: dict[str, Gate] = {}
        self._pending: dict[str, Work] = {}
        self._reaching: dict[str, asyncio.Future[None]] = {}
        self._away: dict[str, float] = {}
        """Since when each facility that cannot be reached has been tried."""
        self._handed: dict[str, tuple[int, Work]] = {}
        """By facility: the last round that was given an update of an earlier one, and that update's work."""
        self._directories: dict[str, str | None] = {}
        self._history: dict[int, dict[str, float]] = {}

    @property
    def workdir(self) -> Path | None:
        """The coordinator's work directory, where late jobs are remembered; None: nowhere."""
        return self._workdir

    @workdir.setter
    def workdir(self, path: Path) -> None:
        if self._workdir is None:
            self._workdir = path
            self._history = latest(read_times(path))
            if self._history:
                write_times(path, self._history)

    def directory(self, job: Any) -> str | None:
        """Where the update lies that the step of `job` hands on: in its own job's directory, or in a late one's.

        None where its round closed before it ended: what it leaves since then is handed on later, and once.
        """
        return self._directories.get(job.name)

    def grace(self, number: int) -> float:
        """Seconds after the quorum of a round; `inf`: no limit. `auto` is learned of the rounds before it."""
        if self.settings.grace != "auto":
            return float(self.settings.grace)
        rounds = [self._history[n] for n in sorted(self._history) if n < number]
        return best_grace(rounds, self.quorum, exponent=self.exponent, most_late=self.most_late, carries=self._carries)

    def _closes_in(self, gate: Gate, number: int) -> float:
        """Seconds from the quorum to the closing; `auto` is learned of facilities that begin with the round."""
        grace = self.grace(number)
        if self.settings.grace != "auto" or not math.isfinite(grace):
            return grace
        usual = usual_quorum([self._history[n] for n in sorted(self._history)], self.quorum)
        return closes_after(now(), gate.opened, usual, grace)

    async def run(self, job: Any, errand: Errand) -> Any | None:
        """What the engine's own `execute` returns for `job`, or None where the round closed before.

        A job that an earlier round left at work takes the place of this one.
        """
        number, facility = int(job.inputs[INPUT].value), errand.facility
        if self.workdir is not None:
            drop_late(self.workdir, number, facility)
        attempt = job.name.rpartition("/")[2]
        if attempt not in self._gates:
            self._gates[attempt] = Gate(
                discounted=discounted(self.workdir, number) if self.workdir else set(),
                waited_for={name for name, work in self._pending.items() if self._stays(number, work)},
            )
            if self.workdir is not None:
                write_wait(self.workdir, number, None)
        gate = self._gates[attempt]
        gate.begun.add(facility)
        try:
            return await self._ending(number, job, errand, gate)
        finally:
            gate.at_work.pop(facility, None)
            gate.wait_for(facility, False)
            enough = len(gate.begun) == self.facilities and len(gate.delivered) >= self.fewest
            if enough and gate.waits_for_unreached:  # those that might make the quorum have no job
                self._after(gate.closed_to_unreached.set, self.settings.away)

    async def _ending(self, number: int, job: Any, errand: Errand, gate: Gate) -> Any | None:
        """Run a facility's job to its end, or until the round closes, once the round is open."""
        facility, work = errand.facility, self._work(number, errand)
        while True:
            gate.at_work[facility] = work
            stays = self._stays(number, work)
            gate.wait_for(facility, stays)
            if not await self._ends_first(facility, work, gate, stays=stays):
                self._leave(number, job, errand, work)
                return None
            if work.task.result() is not None:
                return self._deliver(number, job, errand, work, gate)
            work = self._new(number, errand)  # the job of an earlier run left nothing

    def _stays(self, number: int, work: Work) -> bool:
        """Whether a round waits for this work: the next one could not use it."""
        return number >= self.rounds - 1 or (self._carries and number + 1 - work.round > self.most_late)

    def _work(self, number: int, errand: Errand) -> Work:
        """What the facility is at in this round: a job that it has already, one that is found again, or a new one."""
        facility = errand.facility
        handed, late = self._handed.get(facility, (-1, None))
        if handed == number and late is not None:
            return late  # the round is asked for again, and this update is still its own
        before = self._pending.pop(facility, None)
        takes = self._carries and number < self.rounds
        if before is not None and takes:
            return before
        found = self._remembered(number, facility) if before is None and takes else None
        if found is None:
            return self._new(number, errand, after=before)
        work = Work(round=found.round, began=now(), directory=found.directory, searching=True)
        work.task = asyncio.ensure_future(self._search(work, errand, found))
        return work

    def _new(self, number: int, errand: Errand, *, after: Work | None = None) -> Work:
        self._handed.pop(errand.facility, None)
        if self.workdir is not None:
            forget_job(self.workdir, errand.facility)
        work = Work(round=number, began=now(), after=after)
        work.task = asyncio.ensure_future(self._begin(work, errand))
        return work

    def _remembered(self, number: int, facility: str) -> LateJob | None:
        """A late job of an earlier run whose update can still be used."""
        found = None if self.workdir is None else remembered_job(self.workdir, facility)
        if found is None or found.round > number or (found.handed is not None and found.handed < number):
            return None
        if number - found.round > self.most_late:
            report_problem(f"{facility}'s update of round {found.round} is too old for round {number} and is not used")
            return None
        return found

    async def _search(self, work: Work, errand: Errand, found: LateJob) -> Any | None:
        """What a job of an earlier run left; None: nothing."""
        await self._reached(errand)
        work.reached.set()
        result = await errand.find(found)
        if result is not None:
            report_problem(f"{errand.facility}'s update of round {found.round}, left by an earlier run, is found again")
        return result

    async def _begin(self, work: Work, errand: Errand) -> Any:
        """Reach the facility, then run the job there. May be cancelled until `work.reached`."""
        if work.after is not None:
            await asyncio.wait([work.after.task])
        await self._reached(errand)
        work.directory = errand.directory()
        work.reached.set()
        return await errand.execute()

    async def _reached(self, errand: Errand) -> None:
        """Wait until the facility answers; being cancelled here leaves the connection as it is."""
        self._away.setdefault(errand.facility, now())
        before = self._reaching.get(errand.facility)
        if before is not None and not before.done():
            await asyncio.wait([before])
        task = self._reaching[errand.facility] = asyncio.ensure_future(self._reach(errand))
        await asyncio.wait([task])
        task.result()
        del self._away[errand.facility]

    async def _reach(self, errand: Errand) -> None:
        while True:
            try:
                await errand.reach()
            except Exception as error:
                report_away(errand.facility, str(error), ROUND)
                await asyncio.sleep(self.pause_seconds)
            else:
                report_back(errand.facility, ROUND)
                return

    async def _ends_first(self, facility: str, work: Work, gate: Gate, *, stays: bool) -> bool:
        """Whether the work ends before the round closes to it. `stays`: the round waits for a job that has begun."""
        while not work.task.done():
            if self._leaves(facility, work, gate, stays=stays):
                return False
            events = [one for one in (gate.closed, gate.closed_to_unreached, work.reached) if not one.is_set()]
            waits = [asyncio.ensure_future(one.wait()) for one in events]
            ends = [work.task, *waits, *([work.after.task] if work.after is not None and work.busy else [])]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=self.settings.away)
            finally:
                for one in waits:
                    one.cancel()
        return True

    def _leaves(self, facility: str, work: Work, gate: Gate, *, stays: bool) -> bool:
        """Whether the round is closed to this work now."""
        if work.reached.is_set() or work.busy:
            return gate.closed.is_set() and not stays
        tried_long = now() - self._away.get(facility, math.inf) >= self.settings.away
        return gate.closed_to_unreached.is_set() and (tried_long or not stays)

    def _leave(self, number: int, job: Any, errand: Errand, work: Work) -> None:
        """Close the round without a facility: its job goes on, or it begins the next round anew."""
        facility = errand.facility
        self._directories[job.name] = None
        if work.replaceable:
            work.task.cancel()
            if work.after is not None and work.busy:
                self._pending[facility] = work.after
            reason = BUSY if work.busy else UNREACHED
        else:
            self._pending[facility] = work
            reason = CARRIED if self._carries else DISCARDED
            if self.workdir is not None and self._carries and work.directory and not work.searching:
                remember_job(self.workdir, LateJob(facility=facility, round=work.round, directory=work.directory))
        if reason == CARRIED:
            logger.warning(f"round {number} closes without {facility}: {reason}")
            emit("late", facility=facility, round=number, reason=reason)
        else:
            report_problem(f"round {number} closes without {facility}: {reason}")
        if self.workdir is not None:
            write_late(self.workdir, number, facility, reason)

    def _deliver(self, number: int, job: Any, errand: Errand, work: Work, gate: Gate) -> Any:
        result, facility = work.task.result(), errand.facility
        self._directories[job.name] = work.directory
        if work.round < number:
            self._handed[facility] = (number, work)
            if self.workdir is not None:
                move_lost(self.workdir, facility, before=work.round, now=number)
        if self.workdir is not None:
            handed_on(self.workdir, facility, number)
        if result.status is Status.COMPLETED and result.exit_code == 0:
            seconds = self._history.setdefault(number, {})[facility] = now() - work.began
            self._history = latest(self._history)
            if self.workdir is not None:
                add_time(self.workdir, number, facility, seconds)
            if facility not in gate.discounted:
                gate.delivered.add(facility)
            if facility in gate.delivered and len(gate.delivered) == self.quorum:
                grace = self._closes_in(gate, number)
                self._report_wait(number, grace)
                self._after(gate.close, grace)
                self._after(gate.closed_to_unreached.set, min(grace, self.settings.away))
        return result

    def _report_wait(self, number: int, grace: float) -> None:
        """How long the round stays open for those that are still to come, and why; also to the step that commits it."""
        if self.quorum == self.facilities or number >= self.rounds:
            return
        auto, last = self.settings.grace == "auto", number == self.rounds - 1
        limited = not last and math.isfinite(grace)
        if self.workdir is not None:
            wait = Wait(quorum=self.quorum, seconds=grace if limited else None, learned=auto and limited)
            write_wait(self.workdir, number, wait)
        if not last and grace > 0:
            why = "rounds.grace is auto" if auto else "rounds.grace"
            emit("quorum", round=number, delivered=self.quorum, seconds=grace, why=why)

    def _after(self, action: Callable[[], None], seconds: float) -> None:
        if math.isfinite(seconds):
            asyncio.get_running_loop().call_later(seconds, action)


def closing_of_run(arguments: list[str] | None = None) -> Closing | None:
    """What the federation whose streamflow.yml this process runs says; None where rounds wait for all."""
    settings = settings_of_run(arguments)
    if settings is None or settings.closing is None:
        return None
    return Closing(
        settings.closing,
        rounds=settings.rounds,
        facilities=len(settings.facilities),
        most_late=settings.aggregation.maximum_staleness,
        exponent=settings.aggregation.staleness_exponent,
        fewest=max(settings.minimum_facilities, settings.aggregation.fewest_updates),
    )
