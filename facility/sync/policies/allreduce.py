"""All-reduce of gradients in buckets, started while the backward pass still runs.

As in Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020 (buckets in
reverse order of parameters, one all-reduce each as soon as all of its gradients are final), on the members of a
standing group, with the vote of `Lockstep`.
"""

from __future__ import annotations

from typing import Any

import torch

from facility.exchange.scheduling.policies import SyncPolicy
from facility.sync.runtime.buckets import ring_bytes
from facility.sync.runtime.client import Decision
from facility.sync.runtime.flat import Flat, local_shard
from facility.sync.runtime.lockstep import Lockstep, weighted_by_samples
from facility.sync.runtime.process_groups import Channel, ExchangeFailed
from facility.sync.runtime.replica import Context

DECLARATION = SyncPolicy(
    name="allreduce",
    summary="gradients every step, in lockstep, while the backward pass goes on",
    citation="Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020",
    implementation="AllReduce",
    parameters=("weights", "bucket_bytes"),
    lockstep=True,
    synchronous=True,
)


class _Bucket:
    """Consecutive parameters, last first, whose gradients travel together."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self.missing = 0
        """Gradient accumulations still to come in this step."""
        self.vector: torch.Tensor | None = None
        self.work: Any = None


class AllReduce(Lockstep):
    """Buckets are launched in one order on every rank, so that collectives match."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._buckets: list[_Bucket] = []
        size, pending = 0, []
        for parameter in reversed(context.parameters):
            pending.append(parameter)
            size += 4 * local_shard(parameter.detach()).numel()
            if size >= self.settings.bucket_bytes:
                self._buckets.append(_Bucket(pending))
                size, pending = 0, []
        if pending:
            self._buckets.append(_Bucket(pending))
        self._samples: float | None = None
        self._next = 0
        self.overlapped = 0
        """Buckets that were under way before the backward pass ended."""
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook(bucket))
            for bucket in self._buckets
            for p in bucket.parameters
            if p.is_leaf and p.requires_grad
        ]

    def before_step(self, samples: float) -> None:
        super().before_step(samples)
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters) * self.context.backwards_per_step
            bucket.vector = bucket.work = None
        self._next, self._samples = 0, samples if self.settings.weights == "samples" else 1.0

    def reduce_gradients(self, samples: float) -> None:
        expected = samples if self.settings.weights == "samples" else 1.0
        assert self._samples in (None, expected), "before_step was given another number of samples"
        try:
            super().reduce_gradients(samples)
        finally:
            self._samples, self._next = None, 0

    def report(self) -> dict[str, Any]:
        return super().report() | {"buckets": len(self._buckets), "overlapped_here": self.overlapped}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()

    def summed(
        self, channel: Channel, decision: Decision, flat: Flat, samples: float
    ) -> tuple[list[torch.Tensor], int]:
        if self._samples is None or samples != self._samples:  # a repeated exchange, or one not announced
            self._restart()
        for bucket in self._buckets[self._next :]:
            self._launch(bucket, channel, samples)
        self._next, self._samples = len(self._buckets), None
        for bucket in self._buckets:
            channel.wait(bucket.work)
        # Buckets hold parameters last first; the caller wants one vector in the parameters' order, samples last.
        pieces: dict[int, torch.Tensor] = {}
        for bucket in self._buckets:
            assert bucket.vector is not None
            sizes = [local_shard(p.detach()).numel() for p in bucket.parameters]
            for parameter, piece in zip(bucket.parameters, bucket.vector[:-1].split(sizes), strict=True):
                pieces[id(parameter)] = piece
            total = bucket.vector[-1:]
        vectors = [*(pieces[id(p)] for p in self.context.parameters), total]
        return vectors, ring_bytes(flat.bytes, len(decision.members))

    def spoiled(self, decision: Decision) -> None:
        super().spoiled(decision)
        self._restart()

    def _restart(self) -> None:
        self._next, self._samples = 0, None
        for bucket in self._buckets:
            bucket.vector = bucket.work = None

    def _hook(self, bucket: _Bucket) -> Any:
        def count(_: torch.Tensor) -> None:
            bucket.missing -= 1
            while self._samples is not None and self._next < len(self._buckets):
                ready = self._buckets[self._next]
                if ready.missing > 0 or self._standing is None or len(self._standing.members) == 1:
                    break
                try:
                    self._launch(ready, self.channel(self._standing), self._samples)
                except ExchangeFailed:
                    self._samples = None  # reduce_gradients meets the same failure and reports it
                    break
                self._next += 1
                self.overlapped += 1

        return count

    def _launch(self, bucket: _Bucket, channel: Channel, samples: float) -> None:
        grads = [local_shard(p.grad) for p in bucket.parameters]  # type: ignore[arg-type]
        bucket.vector = weighted_by_samples(Flat(grads, self.context.device), samples)
        bucket.work = channel.start_all_reduce(bucket.vector)
