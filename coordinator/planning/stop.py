"""When a search ends: seconds, iterations, or an interrupt, whichever comes first."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Asked by every search between its steps; an interrupt asks it to end and hand out its best."""

    def __init__(self, seconds: float = float("inf"), iterations: int | None = None) -> None:
        self.seconds, self.iterations = seconds, iterations
        self.started = time.monotonic()
        self.interrupted = False

    @property
    def used(self) -> float:
        """Wall-clock seconds since the beginning."""
        return time.monotonic() - self.started

    @property
    def left(self) -> float:
        """Wall-clock seconds until the end; 0 once it is over."""
        return 0.0 if self.interrupted else max(0.0, self.seconds - self.used)

    def __call__(self, iteration: int = 0) -> bool:
        """True if it is time to end after `iteration` iterations."""
        return self.left <= 0 or (self.iterations is not None and iteration >= self.iterations)

    def part(self, share: float) -> Stop:
        """A stop that ends after `share` of what is left (and is over when this one is interrupted)."""
        inner = _Part(self, self.left * share)
        inner.iterations = self.iterations
        return inner


class _Part(Stop):
    def __init__(self, outer: Stop, seconds: float) -> None:
        self.outer = outer
        super().__init__(seconds)

    @property
    def interrupted(self) -> bool:
        return self.outer.interrupted

    @interrupted.setter
    def interrupted(self, value: bool) -> None:
        if value:
            self.outer.interrupted = True


@contextmanager
def on_interrupt(stop: Stop) -> Iterator[None]:
    """The first SIGINT or SIGTERM inside ends `stop`; a second one acts as always."""

    def handler(number: int, frame: FrameType | None) -> None:
        stop.interrupted = True
        for each, old in previous.items():
            signal.signal(each, old)

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
