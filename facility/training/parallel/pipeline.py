"""Forward and backward over stages of a pipeline, by a schedule of torch's.

Only `facility.training.parallel.assemble` imports this, where a plan has stages: torch's pipelining brings its tracer.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from facility.exchange.errors import ConfigurationError
from facility.exchange.schedules.registry import SCHEDULES, PipelineSchedule
from facility.training.data.tasks import Batch, Task
from facility.training.parallel.sharder import Sharder
from facility.training.parallel.split import Stage
from facility.training.parallel.structure import ModelStructure


def torch_class(schedule: PipelineSchedule) -> Any:
    """The class that runs a schedule: torch's own of this name, or that of `package.module:Class`.

    Raises `ConfigurationError` where there is none.
    """
    module, _, name = schedule.torch_class.rpartition(":")
    try:
        found = getattr(importlib.import_module(module) if module else torch_schedules, name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"schedule {schedule.name} names torch_class {schedule.torch_class!r}: {error}; expected a class of "
            "torch.distributed.pipelining.schedules, or package.module:Class"
        ) from None
    if not (isinstance(found, type) and issubclass(found, torch_schedules._PipelineSchedule)):
        raise ConfigurationError(
            f"schedule {schedule.name} names torch_class {schedule.torch_class!r}, which is not a schedule; expected a "
            "class that extends PipelineScheduleSingle or PipelineScheduleMulti"
        )
    return found


def class_for(schedule: PipelineSchedule, micro_batches: int, chunks: int) -> Any:
    """The class that runs so many micro-batches through so many chunks of a model.

    torch's 1F1B refuses fewer micro-batches than chunks. No rank has a steady state then: GPipe holds as much and
    computes the same. Raises `ConfigurationError` as `torch_class` does.
    """
    kind = torch_class(schedule)
    few = kind is torch_schedules.Schedule1F1B and micro_batches < chunks
    return torch_schedules.ScheduleGPipe if few else kind


class Pipeline:
    """Stages of a model on the ranks of one pipeline; this rank holds `stages`, in order."""

    def __init__(self, stages: dict[int, Stage], structure: ModelStructure, task: Task, sharder: Sharder) -> None:
        layout, precision = sharder.layout, sharder.precision
        assert sharder.mesh is not None
        group, chunks = sharder.mesh["stage"].get_group(), len(layout.units)
        micro_batch_sequences = layout.shape.micro_batch_sequences
        self.stages, self.chunks, self.task = stages, chunks, task
        self.precision, self.clock = precision, sharder.clock
        self.modules: list[nn.Module] = list(stages.values())
        self.tells_loss, self.takes_tokens = chunks - 1 in stages, 0 in stages
        self.group, self.device, self.structure = group, precision.device, structure
        self._weight = 1.0
        shape = (micro_batch_sequences, structure.tokens, structure.hidden)
        activation = torch.empty(shape, dtype=precision.dtype, device="meta", requires_grad=True)
        entering = (micro_batch_sequences, *structure.input_shape)
        values = torch.empty(entering, dtype=structure.input_dtype, device="meta")
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
                input_args=(values if index == 0 else activation,),
                output_args=(logits if index == chunks - 1 else activation,),
            )
            for index, stage in stages.items()
        ]
        for stage in built:  # what is not inside these is waiting for other stages: the bubble
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                setattr(stage, name, self.clock.timed("busy", getattr(stage, name)))
        micro_batches = layout.shape.micro_batches[layout.grid.data_rank(sharder.ranks.rank)]
        kind = class_for(SCHEDULES.get(layout.schedule), micro_batches, chunks)
        several = issubclass(kind, torch_schedules.PipelineScheduleMulti)
        try:
            self.schedule = kind(
                built if several else built[0], micro_batches, loss_fn=self._weighted, scale_grads=False
            )
        except ValueError as error:
            raise ConfigurationError(f"schedule {layout.schedule} does not fit: {error}") from None

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
            if name != self.task.main_input
        }
        if self.task.pools and self.tells_loss:
            extra["token_ids"] = torch.cat([b.inputs["input_ids"] for b in batches]).to(self.device)
        arguments = (self._entering(batches),) if self.takes_tokens else ()
        target = torch.cat([b.targets for b in batches]).to(self.device) if self.tells_loss else None
        if self.chunked:
            assert target is not None
            extra["targets"] = target  # cut into micro-batches like the other inputs
        with self.clock("pipeline"), self.precision():
            self.schedule.step(
                *arguments, return_outputs=False, target=target, losses=losses if self.tells_loss else None, **extra
            )
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum() / weight

    def _entering(self, batches: Sequence[Batch]) -> torch.Tensor:
        """What the first stage is called with."""
        name = self.task.main_input
        values = torch.cat([batch.inputs[name] for batch in batches]).to(self.device)
        return self.task.on_device({name: values})[name]

    def evaluate(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward pass from chunk to chunk; each rank waits for its turn."""
        name = self.task.main_input
        extra = {n: v.to(self.device) for n, v in batch.inputs.items() if n != name}
        sequences, tokens = len(batch.inputs[name]), self.structure.tokens
        if name == "input_ids":
            tokens = batch.inputs[name].shape[1]
        targets = batch.targets.to(self.device)
        if self.chunked:
            extra["targets"] = targets
        if self.task.pools and self.tells_loss:
            extra["token_ids"] = batch.inputs["input_ids"].to(self.device)
        pending: list[dist.Work | None] = []
        result = right = torch.zeros((), device=self.device)
        output = result
        row, rows = dist.get_rank(self.group), dist.get_world_size(self.group)
        for index, stage in self.stages.items():
            if index == 0:
                value = self._entering([batch])
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
                right = self.task.correct(output, targets) if self.task.answers else right
            elif index + 1 not in self.stages:
                pending.append(dist.isend(output, group=self.group, group_dst=(row + 1) % rows))
        for work in pending:
            if work is not None:
                work.wait()
        return result, right
