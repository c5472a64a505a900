"""Replicas in processes of their own: a quadratic problem under any policy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from queue import Empty
from typing import Any

from facility.exchange.messages.sync import SyncSettings
from tests.distributed import processes_that_stay_imported
from tests.ports import free_port

QUICK = {"heartbeat_seconds": 0.1, "missing_seconds": 30.0, "timeout_seconds": 60.0}


def settings_of(**changes: Any) -> SyncSettings:
    return SyncSettings(**(QUICK | changes))


def _entry(function: Callable[..., Any], rank: int, port: int, world: int, arguments: tuple, queue: Any) -> None:
    import traceback

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=200))
        queue.put((rank, True, function(rank, world, store, *arguments)))
        code = 0
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
        code = 1
    queue.close()
    queue.join_thread()
    if rank == 0:  # the store's host leaves last: it is killed when the others have ended
        time.sleep(600)
    os._exit(code)


class Fleet:
    """`world` processes that run `function(rank, world, store, *arguments)`; results by rank."""

    def __init__(self, function: Callable[..., Any], world: int, *arguments: Any) -> None:
        context = processes_that_stay_imported()
        self.queue = context.Queue()
        port = free_port()
        self._start = partial(context.Process, target=_entry)
        self._arguments = [(function, rank, port, world, arguments, self.queue) for rank in range(world)]
        self.processes = [self._start(args=arguments) for arguments in self._arguments]
        for process in self.processes:
            process.start()

    def restart(self, rank: int) -> None:
        """Once the process of `rank` has died, start another in its place."""
        self.processes[rank].join(timeout=200)
        self.processes[rank] = self._start(args=self._arguments[rank])
        self.processes[rank].start()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: Any) -> None:
        for rank, process in reversed(list(enumerate(self.processes))):
            if rank > 0:
                process.join(timeout=0.5)
            if process.is_alive():
                process.kill()
            process.join()

    def ends(self, count: int, timeout: float = 200) -> list[tuple[int, bool, Any]]:
        """The first `count` ends: rank, whether it ended well, its result or traceback."""
        found: list[tuple[int, bool, Any]] = []
        try:
            while len(found) < count:
                found.append(self.queue.get(timeout=timeout))
        except Empty:
            codes = [process.exitcode for process in self.processes]
            raise AssertionError(f"{len(found)} of {count} ends came, exit codes {codes}: {found}") from None
        return found

    def results(self, count: int, timeout: float = 200) -> dict[int, Any]:
        """The first `count` results; a rank that failed is an AssertionError with its traceback."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(found) < count:
            rank, good, value = self.queue.get(timeout=max(0.1, deadline - time.monotonic()))
            assert good, f"rank {rank} failed:\n{value}"
            found[rank] = value
        return found


def run_fleet(function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 200) -> list[Any]:
    with Fleet(function, world, *arguments) as fleet:
        found = fleet.results(world, timeout)
    return [found[rank] for rank in range(world)]
