"""Which gradients are final while a backward pass still runs, bucket by bucket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from facility.sync.runtime.buckets import bucket_runs
from facility.sync.runtime.flat import local_shard


class GradientBuckets:
    """The parameters in buckets, last first, as a backward pass fills them."""

    def __init__(self, parameters: Sequence[torch.Tensor], limit: int, backwards: int) -> None:
        """`limit`: bytes of a bucket; `backwards`: passes that accumulate in a step."""
        backwards_order = list(reversed(parameters))
        runs = bucket_runs([local_shard(p.detach()) for p in backwards_order], limit)
        rest = iter(backwards_order)
        self.buckets = [[next(rest) for _ in run] for run in runs]
        self._backwards = backwards
        self._missing = [0] * len(self.buckets)
        self._final = [threading.Event() for _ in self.buckets]
        self._begun: Callable[[], None] | None = None
        self.over()
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook(number))
            for number, bucket in enumerate(self.buckets)
            for p in bucket
            if p.is_leaf and p.requires_grad
        ]

    def begin(self, first: Callable[[], None]) -> None:
        """A step begins; `first` is called, from within the backward pass, when the first bucket is final."""
        self._missing = [self._backwards * len(bucket) for bucket in self.buckets]
        for event in self._final:
            event.clear()
        self._begun = first

    def over(self) -> None:
        """The backward pass is over: all gradients are final, those that never came too."""
        self._begun = None
        for event in self._final:
            event.set()

    def wait(self, number: int) -> list[torch.Tensor]:
        """The parameters of that bucket, when their gradients are final."""
        self._final[number].wait()
        return self.buckets[number]

    def all(self) -> None:
        """Wait for the end of the backward pass."""
        for event in self._final:
            event.wait()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, number: int) -> Any:
        def count(_: torch.Tensor) -> None:
            self._missing[number] -= 1
            if self._missing[number] == 0 and self._begun is not None:
                self._final[number].set()
                if number == 0:
                    self._begun()

        return count


class BackgroundTask:
    """Work in a thread of its own."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work, arguments), name="sync-exchange", daemon=True)
        self._thread.start()

    def result(self) -> None:
        """Wait for its end; raises what it raised."""
        self._thread.join()
        if self._problem is not None:
            raise self._problem

    def _run(self, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            work(*arguments)
        except BaseException as problem:
            self._problem = problem
