"""Where a step's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

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
