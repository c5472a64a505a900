"""Event loops on a clock of their own: it stands still while anything runs and jumps to the next timer where all wait.

What a test says of times then holds on any machine, however busy, and nothing sleeps for real.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")
REAL_SECONDS = 200
"""How long a loop without timers waits for a thread or a process; longer is for ever."""


class Clock:
    """Seconds; goes on from one event loop to the next, as a machine's clock does when a process is started again."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def run(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        """As `asyncio.run`, on this clock."""
        with asyncio.Runner(loop_factory=lambda: JumpingLoop(self)) as runner:
            return runner.run(coroutine)


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to the next timer instead of waiting for it."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        super().__init__(_Selector(self.clock))

    @property
    def now(self) -> float:
        return self.clock.now

    @now.setter
    def now(self, seconds: float) -> None:
        self.clock.now = seconds

    def time(self) -> float:
        return self.clock.now


class _Selector(selectors.DefaultSelector):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(REAL_SECONDS if timeout is None else 0)
        if timeout is None and not found:
            raise AssertionError("everything waits, and nothing is left that could end it")
        if timeout is not None and not found:
            self._clock.now += timeout
        return found
