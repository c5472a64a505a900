"""Time inside FSDP2's own collectives, which torch starts by itself in the middle of forward and backward."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from ..clock import Clock


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


def time_collectives(root: nn.Module, clock: Clock) -> None:
    """Count FSDP2's all-gathers and reduce-scatters below `root`, within the times of forward and backward.

    On a CPU they are waited for where they stand; on a GPU they run beside the computation, so their seconds may
    exceed what they delay. The all-reduce between replicas (HSDP) is not among them.
    """
    gather, scatter = TimedAllGather(clock), TimedReduceScatter(clock)
    for module in root.modules():
        if isinstance(module, FSDPModule) and any(True for _ in module.parameters()):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
