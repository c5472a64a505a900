"""Trainings over worker processes, none begun that would likely end after the time is up."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")
Row = dict[str, Any]
MARGIN = 1.15
"""A training may take this multiple of what the slowest one before took for the same work."""


class Clock:
    """How long trainings take by their work, and how long there is."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes if minutes else float("inf")
        self.seconds: dict[str, float] = {}
        """Of the slowest, for one unit of work, by kind."""

    def allows(self, kind: str, work: float) -> bool:
        """Whether a training that begins now would end in time; the first of its kind begins if there is any time."""
        return time.monotonic() + MARGIN * work * self.seconds.get(kind, 0.0) < self.end

    def took(self, kind: str, work: float, seconds: float) -> None:
        self.seconds[kind] = max(self.seconds.get(kind, 0.0), seconds / max(work, 1.0))


def one_thread() -> None:
    """Workers share the cores."""
    import torch

    torch.set_num_threads(1)


def spread(
    cells: Sequence[T],
    run: Callable[[T], Row],
    *,
    jobs: int,
    minutes: float,
    kind: Callable[[T], str],
    work: Callable[[T], float],
) -> Iterator[tuple[T, Row | None]]:
    """Each cell with its row as it ends, or with None where time was too short for it or a worker's training failed.

    A row's `seconds` are those of its training alone; a kept row took no time.
    """
    clock, waiting = Clock(minutes), deque(cells)
    if jobs == 1:
        while waiting:
            cell = waiting.popleft()
            yield cell, _timed(run, cell, clock, kind, work)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    running: dict[Future[Row], tuple[T, float]] = {}
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=one_thread) as pool:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.popleft()
                if clock.allows(kind(cell), work(cell)):
                    running[pool.submit(run, cell)] = cell, time.monotonic()
                else:
                    yield cell, None
            for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                cell, began = running.pop(future)
                if (error := future.exception()) is not None:
                    traceback.print_exception(error)  # the others go on
                    yield cell, None
                    continue
                row = future.result()
                clock.took(kind(cell), work(cell), min(time.monotonic() - began, row["seconds"]))
                yield cell, row


def _timed(
    run: Callable[[T], Row], cell: T, clock: Clock, kind: Callable[[T], str], work: Callable[[T], float]
) -> Row | None:
    if not clock.allows(kind(cell), work(cell)):
        return None
    began = time.monotonic()
    row = run(cell)
    clock.took(kind(cell), work(cell), min(time.monotonic() - began, row["seconds"]))
    return row
