"""The coordinator's own closing of rounds on a clock that jumps from event to event: no engine, no waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from streamflow.core.workflow import Status

from coordinator.config.closing import ClosingSettings
from coordinator.streamflow_plugin.closing import INPUT, Closing
from coordinator.streamflow_plugin.errand import Errand
from tests.streamflow_plugin.virtual_time import JumpingLoop

DONE = SimpleNamespace(status=Status.COMPLETED, exit_code=0)
Seconds = Callable[[str, int], float]
"""How long a facility's job of a round takes, queue included."""
MOST_LATE = 8


@dataclass(kw_only=True)
class Course:
    """How a federation went: who delivered what in which round, and when each round closed."""

    closed: list[float] = field(default_factory=list)
    delivered: list[dict[str, int]] = field(default_factory=list)
    """By round: facility and the round that its update started from."""

    @property
    def updates(self) -> int:
        return sum(map(len, self.delivered))

    def useful(self, exponent: float = 0.5) -> float:
        """Updates, each at what it counts."""
        return sum((1 + number - one) ** -exponent for number, by in enumerate(self.delivered) for one in by.values())


def course_of(
    settings: ClosingSettings | None,
    names: list[str],
    seconds: Seconds,
    rounds: int,
    *,
    between: float = 0.0,
    most_late: int = MOST_LATE,
) -> Course:
    """The real closing of rounds; None: every round waits for all. `between`: seconds from a closing to its model."""
    loop, course = JumpingLoop(), Course()
    asked = settings or ClosingSettings(late="wait")
    closing = Closing(asked, rounds=rounds, facilities=len(names), most_late=most_late)
    jobs: dict[str, int] = {}

    async def step(name: str, number: int) -> None:
        job: Any = SimpleNamespace(
            name=f"/rounds/train_{name}/0.{number}", inputs={INPUT: SimpleNamespace(value=number)}
        )
        directory = f"{name}/{number}"

        async def reach() -> None:
            return None

        async def execute() -> Any:
            jobs[directory] = number
            await asyncio.sleep(seconds(name, number))
            return DONE

        async def find(late: object) -> None:
            return None

        errand = Errand(facility=name, reach=reach, execute=execute, directory=lambda: directory, find=find)
        await closing.run(job, errand)
        await asyncio.sleep(0)
        if (found := closing.directory(job)) is not None:
            course.delivered[number][name] = jobs[found]

    async def everything() -> None:
        for number in range(rounds):
            if number:
                await asyncio.sleep(between)
            course.delivered.append({})
            await asyncio.gather(*(step(name, number) for name in names))
            course.closed.append(loop.now)

    loop.run_until_complete(everything())
    loop.close()
    return course
