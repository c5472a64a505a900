"""Forward and backward over what a rank holds: a whole model (or its shards), or stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn.parallel import DistributedDataParallel

from facility.exchange.errors import ConfigurationError
from facility.exchange.schedules.registry import SCHEDULES
from facility.training.data.tasks import Batch, Task
from facility.training.head import ChunkedHead
from facility.training.monitor.clock import Clock
from facility.training.parallel.split import ModelStructure, Stage


class Compute(Protocol):
    """What the engine needs of a layout."""

    modules: list[nn.Module]
    """What this rank holds."""
    tells_loss: bool
    """Does this rank know the loss (is the head here)?"""

    def train(self, batches: Sequence[Batch], weight: float) -> torch.Tensor:
        """Gradients of `weight` times the summed loss of all batches; returns the summed loss where it is known."""

    def loss(self, batch: Batch) -> torch.Tensor:
        """Summed loss of one batch without gradients, where it is known, else 0."""


class Precision:
    """How an unsharded module computes in half precision; FSDP2 casts by itself."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, casts_itself: bool) -> None:
        self.device, self.dtype = device, dtype
        self.off = casts_itself or dtype == torch.float32

    def __call__(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.off else torch.autocast(self.device.type, dtype=self.dtype)


class Whole:
    """The whole model in one forward pass."""

    tells_loss = True

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        precision: Precision,
        clock: Clock,
        *,
        replicated: DistributedDataParallel | None = None,
        chunked: ChunkedHead | None = None,
    ) -> None:
        """`replicated`: the model among its replicas, who exchange gradients at a step's last micro-batch, so that they
        may make unlike numbers. `chunked`: where the model returns the summed loss instead of logits."""
        self.task, self.precision, self.clock = task, precision, clock
        self.replicated, self.chunked = replicated, chunked
        self.modules: list[nn.Module] = [model]
        self.device = precision.device

    def _forward(self, batch: Batch, model: nn.Module) -> torch.Tensor:
        inputs = {name: value.to(self.device, non_blocking=True) for name, value in batch.inputs.items()}
        targets = batch.targets.to(self.device, non_blocking=True)
        if self.chunked is not None:
            self.chunked.targets = targets
        with self.precision():
            logits = model(**inputs).logits
        return logits.float().sum() if self.chunked is not None else self.task.loss_sum(logits, targets)

    def train(self, batches: Sequence[Batch], weight: float) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches):
            waits = self.replicated is not None and number < len(batches) - 1
            with self.replicated.no_sync() if self.replicated is not None and waits else nullcontext():
                with self.clock("forward"):
                    loss = self._forward(batch, self.replicated or self.modules[0])
                with self.clock("backward"):
                    (loss * weight).backward()
            total += loss.detach()
        return total

    def loss(self, batch: Batch) -> torch.Tensor:
        return self._forward(batch, self.modules[0])


class Pipeline:
    """Stages of a model on the ranks of one pipeline; this rank holds `stages`, in order."""

    def __init__(
        self,
        stages: dict[int, Stage],
        chunks: int,
        structure: ModelStructure,
        task: Task,
        precision: Precision,
        clock: Clock,
        *,
        group: dist.ProcessGroup,
        schedule: str,
        micro_batches: int,
        micro_batch_sequences: int,
        block_tokens: int,
    ) -> None:
        self.stages, self.chunks, self.task, self.precision, self.clock = stages, chunks, task, precision, clock
        self.modules: list[nn.Module] = list(stages.values())
        self.tells_loss, self.takes_tokens = chunks - 1 in stages, 0 in stages
        self.group, self.device, self.structure = group, precision.device, structure
        self._weight = 1.0
        shape = (micro_batch_sequences, block_tokens, structure.hidden)
        activation = torch.empty(shape, dtype=precision.dtype, device="meta", requires_grad=True)
        tokens = torch.empty(micro_batch_sequences, block_tokens, dtype=torch.int64, device="meta")
        self.chunked = any(stage.chunked is not None for stage in stages.values())
        result = (1,) if self.chunked else (micro_batch_sequences, *structure.logits)
        logits = torch.empty(result, dtype=torch.float32, device="meta", requires_grad=True)
        built = [
            PipelineStage(
                stage,
                index,
                chunks,
                self.device,
                group=group,
                input_args=(tokens if index == 0 else activation,),
                output_args=(logits if index == chunks - 1 else activation,),
            )
            for index, stage in stages.items()
        ]
        for stage in built:  # what is not inside these is waiting for other stages: the bubble
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                setattr(stage, name, clock.timed("busy", getattr(stage, name)))
        kind = getattr(torch_schedules, SCHEDULES.get(schedule).torch_class)
        several = issubclass(kind, torch_schedules.PipelineScheduleMulti)
        try:
            self.schedule = kind(
                built if several else built[0], micro_batches, loss_fn=self._weighted, scale_grads=False
            )
        except ValueError as error:
            raise ConfigurationError(f"schedule {schedule} does not fit: {error}") from None

    def _weighted(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._loss_sum(logits, targets) * self._weight

    def _loss_sum(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return output.float().sum() if self.chunked else self.task.loss_sum(output, targets)

    def train(self, batches: Sequence[Batch], weight: float) -> torch.Tensor:
        self._weight = weight
        losses: list[torch.Tensor] = []
        extra = {
            name: torch.cat([b.inputs[name] for b in batches]).to(self.device)
            for name in batches[0].inputs
            if name != "input_ids"
        }
        if self.task.pools and self.tells_loss:
            extra["token_ids"] = torch.cat([b.inputs["input_ids"] for b in batches]).to(self.device)
        arguments = (torch.cat([b.inputs["input_ids"] for b in batches]).to(self.device),) if self.takes_tokens else ()
        target = torch.cat([b.targets for b in batches]).to(self.device) if self.tells_loss else None
        if self.chunked:
            assert target is not None
            extra["targets"] = target  # cut into micro-batches like the other inputs
        with self.clock("pipeline"), self.precision():
            self.schedule.step(*arguments, target=target, losses=losses if self.tells_loss else None, **extra)
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum() / weight

    def loss(self, batch: Batch) -> torch.Tensor:
        """One forward pass from chunk to chunk; each rank waits for its turn."""
        extra = {n: v.to(self.device) for n, v in batch.inputs.items() if n != "input_ids"}
        sequences, tokens = batch.inputs["input_ids"].shape
        targets = batch.targets.to(self.device)
        if self.chunked:
            extra["targets"] = targets
        if self.task.pools and self.tells_loss:
            extra["token_ids"] = batch.inputs["input_ids"].to(self.device)
        pending: list[dist.Work | None] = []
        result = torch.zeros((), device=self.device)
        output = result
        row, rows = dist.get_rank(self.group), dist.get_world_size(self.group)
        for index, stage in self.stages.items():
            if index == 0:
                value = batch.inputs["input_ids"].to(self.device)
            elif index - 1 in self.stages:
                value = output
            else:
                value = torch.empty(
                    sequences, tokens, self.structure.hidden, dtype=self.precision.dtype, device=self.device
                )
                dist.recv(value, group=self.group, group_src=(row - 1) % rows)
            with self.precision():
                output = stage(value, **extra)
            if index == self.chunks - 1:
                result = self._loss_sum(output, targets)
            elif index + 1 not in self.stages:
                pending.append(dist.isend(output, group=self.group, group_dst=(row + 1) % rows))
        for work in pending:
            if work is not None:
                work.wait()
        return result
