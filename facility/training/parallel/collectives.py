"""Time inside FSDP2's and DDP's own collectives, which torch starts by itself in the middle of forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.nn.parallel import DistributedDataParallel

from facility.training.monitor.clock import Clock, Moment


class TimedAllGather(DefaultAllGather):
    """FSDP2's own all-gather, under a clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.on_stream("all_gather"):
            return super().__call__(*args, **kwargs)


class TimedReduceScatter(DefaultReduceScatter):
    """FSDP2's own reduce-scatter, under a clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.on_stream("reduce_scatter"):
            return super().__call__(*args, **kwargs)


class ReduceScatterThenAllReduce(TimedReduceScatter):
    """Times a reduce-scatter and the all-reduce between replicas that follows it (HSDP).

    FSDP2 has a hook after that all-reduce and none before it, so its time runs from the end of the reduce-scatter.
    Where one shard is the whole there is no reduce-scatter, and the copy of the gradients into the buffer counts too.
    """

    began: Moment

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        buffer = super().allocate(*args, **kwargs)
        self.began = self.clock.moment()
        return buffer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        work = super().__call__(*args, **kwargs)
        self.began = self.clock.moment()
        return work

    def all_reduced(self, output: torch.Tensor) -> None:
        """FSDP2's hook after the all-reduce; leaves the gradients as they are."""
        self.clock.span("all_reduce", self.began, self.clock.moment())


def time_collectives(root: nn.Module, clock: Clock, *, replicas: bool) -> None:
    """Count FSDP2's all-gathers and reduce-scatters below `root`, within the times of forward and backward.

    `replicas`: the mesh has replicas too (HSDP): their all-reduce counts as `all_reduce`, within backward. On a CPU
    collectives are waited for where they stand; on a GPU they run beside the computation, so their seconds may exceed
    what they delay. In a pipeline all of them are within `pipeline`.
    """
    gather = TimedAllGather(clock)
    scatter = ReduceScatterThenAllReduce(clock) if replicas else TimedReduceScatter(clock)
    for module in root.modules():
        if isinstance(module, FSDPModule) and any(True for _ in module.parameters()):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
            if isinstance(scatter, ReduceScatterThenAllReduce):
                module.set_all_reduce_hook(scatter.all_reduced)


def time_all_reduce(replicated: DistributedDataParallel, group: dist.ProcessGroup, clock: Clock) -> None:
    """Count DDP's all-reduces as `all_reduce`, within backward: the time in which at least one of them is under way.

    Waiting for a late replica counts. They run beside the computation, so their seconds may exceed what they delay. The
    hook does what DDP does without one, with the same roundings and one more pass over the gradients: it scales
    by the reciprocal, as DDP's copy into its buckets does, where torch's `allreduce_hook` divides.
    """

    def reduced(group, bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotations that are text
        gradients = bucket.buffer().mul_(1.0 / group.size())
        began = clock.moment()

        def ended(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            (result,) = future.value()
            clock.span("all_reduce", began, clock.moment())
            return result

        return dist.all_reduce(gradients, group=group, async_op=True).get_future().then(ended)

    replicated.register_comm_hook(group, reduced)
