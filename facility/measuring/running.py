"""Overheads of running pipelines and replicas besides units and bytes, measured with the trainer's own parts.

All ranks take part: the same block plain and as an FSDP replica (one replica per rank), a pipeline of all ranks whose
stages do almost nothing, and the small reductions of an optimizer step. Waiting for other ranks is excluded by taking,
of all ranks, the one that waited least.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from facility.measuring.layers import LayerSettings, Unit, a_block
from facility.measuring.links import MeasuredLinks
from facility.measuring.profile import RunningCosts
from facility.training.devices import synchronize
from facility.training.parallel.shard import shard_model
from facility.training.processes.groups import mesh_of
from facility.training.processes.ranks import Ranks

MICRO_BATCHES = 4
"""Of the empty pipeline, for every stage."""


def measure_running(
    model: Path, ranks: Ranks, settings: LayerSettings, links: MeasuredLinks | None, *, timeout_seconds: float
) -> RunningCosts:
    """Collective: every rank calls it and gets the same answer; a rank that hangs is noticed after the timeout.

    `links`: the time of messages and bytes over them is subtracted, as it is counted elsewhere; None (emulated links):
    the measurements are returned unchanged.
    """
    plain, hooked, synced, gradient_bytes = _passes(model, ranks, settings, timeout_seconds)
    travel = latency = 0.0
    if links is not None:
        ring = [(rank, (rank + 1) % ranks.world) for rank in range(ranks.world)]
        travel = max(
            2
            * (ranks.world - 1)
            * (links.latency_seconds[a][b] + gradient_bytes / ranks.world / links.bytes_per_second[a][b])
            for a, b in ring
        )
        latency = max(links.latency_seconds[a][b] for a, b in ring)
    return RunningCosts(
        pass_seconds=max(0.0, _empty_pass(ranks, settings.repeats) - latency),
        replica_forward_seconds=max(0.0, hooked[0] - plain[0]),
        replica_backward_seconds=max(0.0, hooked[1] - plain[1]),
        agreement_seconds=max(0.0, synced - hooked[1] - travel),
        step_seconds=_sums(ranks, settings.repeats),
    )


def _least(ranks: Ranks, value: float) -> float:
    """The smallest of all ranks' values."""
    box = torch.tensor([value], dtype=torch.float64, device=ranks.device)
    dist.all_reduce(box, op=dist.ReduceOp.MIN)
    return float(box.item())


def _timed(ranks: Ranks, call: Callable[[], object]) -> float:
    """Wall-clock seconds of a call: all replicas run it at once, so contention on shared cores is included."""
    synchronize(ranks.device)
    begin = time.perf_counter()
    call()
    synchronize(ranks.device)
    return time.perf_counter() - begin


def _passes(
    model: Path, ranks: Ranks, settings: LayerSettings, timeout_seconds: float
) -> tuple[tuple[float, float], tuple[float, float], float, float]:
    """(forward, backward) plain, the same hooked without agreeing, backward with agreeing; bytes that are agreed on."""
    one = a_block(model, ranks.device, settings)
    gradient_bytes = 4.0 * sum(p.numel() for p in one.block.parameters())
    plain = _median(ranks, one, settings)
    grid = np.arange(ranks.world).reshape(-1, 1)
    mesh = mesh_of(ranks.device, grid, ("replica", "shard"), ranks.rank, timeout_seconds=timeout_seconds)
    shard_model(one.block, [], mesh, compute_dtype=settings.dtype, reshard=False, root_output=None)
    assert isinstance(one.block, FSDPModule)
    one.block.set_requires_gradient_sync(False)
    hooked = _median(ranks, one, settings)
    one.block.set_requires_gradient_sync(True)
    synced = _median(ranks, one, settings)[1]
    return plain, hooked, synced, gradient_bytes


def _median(ranks: Ranks, one: Unit, settings: LayerSettings) -> tuple[float, float]:
    """Median seconds of a forward and a backward; of the rank that needed least."""
    call, gradient = one.prepared(settings.samples[0])
    ahead, back = [], []
    for number in range(settings.warmup + settings.repeats):
        one.forget()
        dist.barrier()
        outputs: list[torch.Tensor] = []
        forward = _timed(ranks, lambda: outputs.append(call()))  # noqa: B023
        dist.barrier()
        backward = _timed(ranks, gradient(outputs[0]))
        if number >= settings.warmup:
            ahead.append(forward)
            back.append(backward)
    return _least(ranks, statistics.median(ahead)), _least(ranks, statistics.median(back))


class _Through(nn.Module):
    """A stage that computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.scale


def _empty_pass(ranks: Ranks, repeats: int) -> float:
    """Seconds of one pass of a stage that computes nothing: an empty pipeline's, divided by its slots."""
    if ranks.world < 2:
        return 0.0
    micro_batches = MICRO_BATCHES * ranks.world
    shape = torch.empty(1, 8, device="meta", requires_grad=True)
    stage = PipelineStage(
        _Through().to(ranks.device), ranks.rank, ranks.world, ranks.device, input_args=(shape,), output_args=(shape,)
    )
    schedule = ScheduleGPipe(stage, micro_batches, loss_fn=lambda y, t: (y - t).sum())
    first, last = ranks.rank == 0, ranks.rank == ranks.world - 1
    batch = torch.zeros(micro_batches, 8, device=ranks.device)
    found = []
    for number in range(repeats + 1):
        dist.barrier()
        seconds = _timed(
            ranks,
            lambda: schedule.step(*((batch,) if first else ()), target=batch if last else None),
        )
        if number:
            found.append(seconds)
    slots = 2 * (micro_batches + ranks.world - 1)
    return _least(ranks, statistics.median(found)) / slots


def _sums(ranks: Ranks, repeats: int) -> float:
    """Seconds of the three small sums of a step: predictions, norm, loss."""
    box = torch.zeros(1, dtype=torch.float64, device=ranks.device)

    def three() -> None:
        for _ in range(3):
            dist.all_reduce(box)

    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        found.append(_timed(ranks, three))
    return _least(ranks, statistics.median(found))
