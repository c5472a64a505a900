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
        self._wait = exact and device.type == "cuda"

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self._wait:
            torch.cuda.synchronize()
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted under `part`."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self(part):
                return function(*args, **kwargs)

        return measured
