"""Rounds that close without waiting for all: a facility's step ends when its job does, or when its round closes.

The job of a facility that is late goes on in its queue. Its step yields nothing, so the round is averaged without it;
in the next round the facility gets no new job: its step waits for the one that runs, and hands on what that leaves, an
update of an earlier round. A round waits for an update that would be too late to count in the next (bounded staleness:
Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", section 3); the last
round and the final evaluation wait for all: no update is lost.

What the engine does not tell apart is decided here, inside `streamflow run`, for every kind of connector alike.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamflow.core.workflow import Status

from coordinator.config.closing import ClosingSettings
from coordinator.config.settings import read_coordinator_settings
from coordinator.rounds.late import write_late
from coordinator.streamflow_plugin.grace import best_grace
from coordinator.streamflow_plugin.patient import step_of, tell
from facility.exchange.errors import CrossFedError

INPUT = "round"
"""Port of cwl/tools/train.cwl that holds the round's number."""

Execute = Callable[[], Awaitable[Any]]


@dataclass(kw_only=True)
class Pending:
    """A job that its round did not wait for."""

    task: asyncio.Future[Any]
    job: Any
    """The engine's job whose directory the update will be in."""
    began: float
    round: int
    """Of the model that it trains from."""


@dataclass(kw_only=True)
class Gate:
    """Whether a round has closed."""

    closed: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: bool = False
    """The grace runs."""


class Closing:
    """Of one run of the engine."""

    def __init__(
        self, settings: ClosingSettings, *, rounds: int, facilities: int, most_late: int, exponent: float = 0.5
    ) -> None:
        """`most_late`: rounds that an update may be late and still count; `exponent`: of the weight of late ones."""
        self.settings, self.rounds = settings, rounds
        self.quorum, self.most_late, self.exponent = settings.needed(facilities), most_late, exponent
        self.workdir: Path | None = None
        """The coordinator's work directory, where a late facility is noted for its receive step."""
        self._gates: dict[int, Gate] = {}
        self._pending: dict[str, Pending] = {}
        self._sources: dict[str, Any] = {}
        self._left_out: set[str] = set()
        self._history: dict[int, dict[str, float]] = {}

    def source(self, job: Any) -> Any | None:
        """The job whose directory holds what `job` hands on: itself, or the late one that it waited for.

        None where its round closed before it ended: what it leaves since then is handed on later, and once.
        """
        return None if job.name in self._left_out else self._sources.get(job.name, job)

    def grace(self) -> float:
        """Seconds after the quorum; `inf`: no limit."""
        if self.settings.grace != "auto":
            return float(self.settings.grace)
        return best_grace([self._history[n] for n in sorted(self._history)], self.quorum, exponent=self.exponent)

    async def run(self, job: Any, execute: Execute) -> Any | None:
        """What the engine's own `execute` returns for `job`, or None where the round closed before.

        A job that an earlier round left at work takes the place of this one.
        """
        number, step = int(job.inputs[INPUT].value), step_of(job.name)
        began, source, trained = time.monotonic(), job, number
        task: asyncio.Future[Any]
        carries = self.settings.late == "carry"
        if (before := self._pending.pop(step, None)) is not None:
            if not carries or number >= self.rounds:
                await asyncio.wait([before.task])
                task = asyncio.ensure_future(execute())
            else:
                task, source, began, trained = before.task, before.job, before.began, before.round
        else:
            task = asyncio.ensure_future(execute())
        if number >= self.rounds - 1 or (carries and number + 1 - trained > self.most_late):
            return await self._deliver(number, step, job, source, task, began)
        gate = self._gates.setdefault(number, Gate())
        closed = asyncio.ensure_future(gate.closed.wait())
        try:
            await asyncio.wait([task, closed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
        if task.done():
            return await self._deliver(number, step, job, source, task, began)
        self._left_out.add(job.name)
        self._pending[step] = Pending(task=task, job=source, began=began, round=trained)
        facility = step.rpartition("/")[2].removeprefix("train_")
        fate = "is averaged in a later round" if carries else "is discarded"
        tell(f"round {number} closes without {facility}, whose job goes on; its update {fate}")
        if self.workdir is not None:
            write_late(self.workdir, number, facility, fate)
        return None

    async def _deliver(
        self, number: int, step: str, job: Any, source: Any, task: asyncio.Future[Any], began: float
    ) -> Any:
        result = await task
        if source is not job:
            self._sources[job.name] = source
        if result.status is Status.COMPLETED and result.exit_code == 0:
            took = time.monotonic() - began
            delivered = self._history.setdefault(number, {})
            delivered[step] = took
            gate = self._gates.get(number)
            if gate is not None and len(delivered) >= self.quorum and not gate.waiting:
                gate.waiting = True
                self._close_after(gate, self.grace())
        return result

    def _close_after(self, gate: Gate, seconds: float) -> None:
        if math.isfinite(seconds):
            asyncio.get_running_loop().call_later(seconds, gate.closed.set)


def closing_of_run(arguments: list[str] | None = None) -> Closing | None:
    """What the federation whose streamflow.yml this process runs says; None where rounds wait for all."""
    words = sys.argv if arguments is None else arguments
    files = [Path(word) for word in words if word.endswith("streamflow.yml")]
    described = files[0].resolve().parent / "coordinator.json" if files else None
    if described is None or not described.is_file():
        return None
    try:
        settings = read_coordinator_settings(described)
    except CrossFedError:
        return None  # the start step tells it
    if settings.closing is None:
        return None
    return Closing(
        settings.closing,
        rounds=settings.rounds,
        facilities=len(settings.facilities),
        most_late=settings.aggregation.maximum_staleness,
        exponent=settings.aggregation.staleness_exponent,
    )
