"""Where a step's time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Clock:
    """Seconds by the name of a part of the work; on a GPU the parts are waited for only when `exact`."""

    def __init__(self, device: torch.device, *, exact: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self._stopped = False
        self._cuda = device.type == "cuda"
        self._wait = exact and self._cuda
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self._wait:
            torch.cuda.synchronize()
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

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave out what `on_stream` would see: an evaluation is no part of a step."""
        self._stopped = True
        try:
            yield
        finally:
            self._stopped = False

    def settle(self) -> None:
        """Add what `on_stream` saw and the GPU has finished; never waits."""
        waiting = []
        for part, began, ended in self._marks:
            if ended.query():
                self.seconds[part] = self.seconds.get(part, 0.0) + began.elapsed_time(ended) / 1000
            else:
                waiting.append((part, began, ended))
        self._marks = waiting

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted under `part`."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self(part):
                return function(*args, **kwargs)

        return measured
