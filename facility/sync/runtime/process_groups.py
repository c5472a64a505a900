"""Process groups among the members of one decision only: built on a fresh name, bounded, never used after a failure.

`torch.distributed.new_group` needs every rank of the world, and its local synchronisation breaks for changing groups
(pytorch#173608); so a backend is built directly among the members, on a store prefix that the scheduler numbers.
After one timeout a gloo context is dead (its pairs are closed), so a failed group is set aside and its number never
comes again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from facility.exchange.errors import first_line

SLICE_SECONDS = 0.05
"""How often a waiting rank looks whether the scheduler has called the exchange off; on a GPU, `LOOK_SECONDS`."""
LOOK_SECONDS = 0.0002
"""How often it looks whether a collective is complete on a GPU."""


class ExchangeFailed(Exception):
    """An exchange did not take place: a member is gone or too slow. What follows is up to the group's decision."""


class Channel:
    """A process group of one decision's members, and waiting on it that can be called off."""

    def __init__(self, backend: Any, timeout_seconds: float, called_off: Callable[[], bool], device: torch.device):
        self.backend, self.timeout_seconds, self.called_off, self.device = backend, timeout_seconds, called_off, device

    def wait(self, work: Any) -> None:
        """Wait for a collective in slices. Raises `ExchangeFailed`."""
        deadline = time.monotonic() + self.timeout_seconds
        while True:
            try:
                if self.device.type == "cuda":
                    while not work.is_completed() and not self.called_off() and time.monotonic() < deadline:
                        time.sleep(LOOK_SECONDS)
                    if not work.is_completed():
                        raise ExchangeFailed("called off" if self.called_off() else "too slow")
                    work.wait()
                else:
                    work.wait(timedelta(seconds=SLICE_SECONDS))
                return
            except RuntimeError as error:
                if work.is_completed():  # perhaps since the slice ran out: then `error` speaks of the slice alone
                    self.guarded(work.wait)
                    return
                if time.monotonic() > deadline:
                    raise ExchangeFailed(first_line(error)) from None
                if self.called_off():
                    raise ExchangeFailed("called off: a member is gone") from None

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the members, in place."""
        self.wait(self.start_all_reduce(tensor))

    def start_all_reduce(self, tensor: torch.Tensor) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
        return self.guarded(lambda: self.backend.allreduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self.wait(self.guarded(lambda: self.backend.broadcast([tensor], options)))

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        """Sum over the members; only the root's tensor holds the result."""
        options = dist.ReduceOptions()
        options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
        options.rootRank, options.rootTensor = root, 0
        self.wait(self.guarded(lambda: self.backend.reduce([tensor], options)))

    def reduce_scatter(self, out: torch.Tensor, pieces: torch.Tensor) -> None:
        """`out` becomes this member's equal piece of the sum over the members."""
        self.wait(self.guarded(lambda: self.backend._reduce_scatter_base(out, pieces, dist.ReduceScatterOptions())))

    def all_gather(self, out: torch.Tensor, piece: torch.Tensor) -> None:
        self.wait(self.guarded(lambda: self.backend._allgather_base(out, piece, distributed_c10d.AllgatherOptions())))

    @staticmethod
    def guarded(start: Callable[[], Any]) -> Any:
        try:
            return start()
        except RuntimeError as error:
            raise ExchangeFailed(first_line(error)) from None


class Channels:
    """The open process groups of one rank, by the scheduler's channel number.

    The scheduler decides what is kept and what goes: caches that each rank keeps by itself would diverge.
    """

    def __init__(self, store: dist.Store, position: int, device: torch.device, timeout_seconds: float) -> None:
        self.store, self.position, self.device = store, position, device
        self.timeout_seconds = timeout_seconds
        self.built = 0
        self._open: dict[int, Channel] = {}
        self._dead: list[Channel] = []
        self._idle: list[dist.Store] = [] if device.type == "cuda" else [self._connected()]
        """Unused connections to the store. A new one asks the name server for the peer's name (torch's log
        line), which takes milliseconds or, where no server answers, many seconds."""

    def _connected(self) -> dist.Store:
        return self.store.clone()  # type: ignore[attr-defined,no-any-return]

    def get(self, number: int, members: Sequence[int], me: int, called_off: Callable[[], bool]) -> Channel:
        """The open channel, or a new one that meets the members. Raises `ExchangeFailed`."""
        channel = self._open.get(number)
        if channel is None:
            channel = self._build(number, members, me, called_off)
            self._open[number] = channel
        channel.called_off = called_off
        return channel

    def discard(self, number: int) -> None:
        """Never use this channel again. It may still be stuck in an exchange, so its end is not waited for."""
        channel = self._open.pop(number, None)
        if channel is not None:
            if self.device.type == "cuda":
                channel.backend.abort()
            self._dead.append(channel)

    def evict(self, numbers: Sequence[int]) -> None:
        """Close channels that the scheduler no longer keeps; nothing is under way on them."""
        for number in numbers:
            self._open.pop(number, None)

    def close(self) -> None:
        self._open.clear()
        # What is stuck ends with its own time limit, in a thread that blocks no other.
        dead, self._dead = self._dead, []
        threading.Thread(target=dead.clear, daemon=True).start()

    def _build(self, number: int, members: Sequence[int], me: int, called_off: Callable[[], bool]) -> Channel:
        # A connection of its own: a builder stuck on an absent member must not hold up the next channel.
        connection = self._idle.pop() if self._idle else Channel.guarded(self._connected)
        store = dist.PrefixStore(f"channel/{number}/{self.position}", connection)
        rank, size, limit = list(members).index(me), len(members), timedelta(seconds=self.timeout_seconds)
        made: list[Any] = []
        problem: list[str] = []

        def build() -> None:
            try:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                    options = dist.ProcessGroupNCCL.Options()
                    options._timeout = limit
                    made.append(dist.ProcessGroupNCCL(store, rank, size, options))
                else:
                    made.append(dist.ProcessGroupGloo(store, rank, size, limit))
            except RuntimeError as error:
                problem.append(first_line(error))

        thread = threading.Thread(target=build, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(SLICE_SECONDS)
            if thread.is_alive() and called_off():
                raise ExchangeFailed("called off while meeting the members")
        if problem:
            raise ExchangeFailed(f"meeting {list(members)}: {problem[0]}")
        if self.device.type != "cuda":  # NCCL goes on asking the store when it is first used
            self._idle.append(connection)
        self.built += 1
        return Channel(made[0], self.timeout_seconds, called_off, self.device)
