"""What a facility does for one round, in the order in which it can be interrupted: reach it, then run its job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from coordinator.rounds.late import LateJob


@dataclass(frozen=True, kw_only=True)
class Errand:
    """What the engine can do at one facility for one round."""

    facility: str
    reach: Callable[[], Awaitable[None]]
    """Returns once the facility answers; may be cancelled at any time."""
    execute: Callable[[], Awaitable[Any]]
    """Sends the model, runs the job to its end, and returns what the engine's own `execute` returns."""
    directory: Callable[[], str]
    """The job's own directory there, once the facility was reached."""
    find: Callable[[LateJob], Awaitable[Any | None]]
    """Waits for the end of a job that an earlier run left; returns what `execute` would have, None: it left nothing."""


@dataclass(kw_only=True)
class Work:
    """One errand under way."""

    round: int
    """Of the model that is trained."""
    began: float
    directory: str = ""
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    """A job is at work there, or may be: from then on its update is not to be lost."""
    searching: bool = False
    """A job of an earlier run is being looked for."""
    after: Work | None = None
    """Work of an earlier round that must end first, and whose update is not used."""
    task: asyncio.Future[Any] = field(default_factory=asyncio.Future)

    @property
    def busy(self) -> bool:
        """True while a job whose result is no longer needed runs there."""
        return self.after is not None and not self.after.task.done()

    @property
    def replaceable(self) -> bool:
        """True while a later round may restart it with a newer model without losing work."""
        return not (self.reached.is_set() or self.searching or self.task.done())
