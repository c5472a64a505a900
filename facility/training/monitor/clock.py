"""Where a step's time goes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Moment = float | torch.cuda.Event
"""On a CPU the host's clock, seconds; on a GPU an event of the stream that was current."""


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of what the spans cover together: what two of them share counts once."""
    total, reached = 0.0, -math.inf
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return total


def read(spans: list[tuple[Moment, Moment]]) -> list[tuple[float, float]] | None:
    """The spans in seconds, those of a GPU from the first one's beginning; None while the GPU is not through them."""
    events = [moment for span in spans for moment in span if isinstance(moment, torch.cuda.Event)]
    if not all(event.query() for event in events):
        return None

    def seconds(moment: Moment) -> float:
        return events[0].elapsed_time(moment) / 1000 if isinstance(moment, torch.cuda.Event) else moment

    return [(seconds(began), seconds(ended)) for began, ended in spans]


class Clock:
    """Seconds by the name of a part of the work. Nothing waits for a GPU: `on_stream` times what it works on."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._stopped = False
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._spans: dict[str, list[tuple[Moment, Moment]]] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began

    @contextmanager
    def on_stream(self, part: str) -> Iterator[None]:
        """Work of the current CUDA stream, read by `settle`; on a CPU the same as calling the clock."""
        if self._stopped:
            yield
            return
        if not self._cuda:
            with self(part):
                yield
            return
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        yield
        ended.record()
        self._marks.append((part, began, ended))

    def moment(self) -> Moment:
        """Now; on a GPU, when the current stream gets here."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def span(self, part: str, began: Moment, ended: Moment) -> None:
        """Record work that may overlap others of its part, from any thread; `settle` counts their union."""
        self._spans.setdefault(part, []).append((began, ended))

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave out what `on_stream` would see: an evaluation is not part of a step."""
        self._stopped = True
        try:
            yield
        finally:
            self._stopped = False

    def settle(self) -> None:
        """Add what `on_stream` and `span` saw and the GPU has finished; never waits."""
        waiting = []
        for part, began, ended in self._marks:
            if ended.query():
                self.seconds[part] = self.seconds.get(part, 0.0) + began.elapsed_time(ended) / 1000
            else:
                waiting.append((part, began, ended))
        self._marks = waiting
        for part in list(self._spans):
            if (spans := read(self._spans[part])) is not None:
                self.seconds[part] = self.seconds.get(part, 0.0) + covered(spans)
                del self._spans[part]

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted under `part`."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self(part):
                return function(*args, **kwargs)

        return measured
