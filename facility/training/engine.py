"""One optimizer step over a whole model or its FSDP shards: forward, backward, clip, update; and evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from facility.exchange.settings import TrainingSettings

from .layout.grid import Grid
from .load import Part
from .optimizer import adamw, clip, global_norm
from .ranks import Ranks
from .tasks import Batch, Task


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What an optimizer step tells."""

    loss: float
    """Mean over the predictions of the whole batch, nats."""
    gradient_norm: float
    """Before clipping."""


class Engine:
    """Holds the model, its optimizer and who shares the work."""

    def __init__(
        self, model: nn.Module, parts: Sequence[Part], task: Task, grid: Grid, ranks: Ranks, settings: TrainingSettings
    ) -> None:
        self.model, self.parts, self.task = model, parts, task
        self.grid, self.ranks, self.settings = grid, ranks, settings
        self.compute_dtype = getattr(torch, settings.compute_dtype)
        self.optimizer = adamw(parts, settings)
        self.anchor = [part.tensor.clone() for part in parts] if settings.proximal else []

    def _forward(self) -> AbstractContextManager[object]:
        """FSDP2 casts by itself; an unsharded model computes in half precision by autocast."""
        if self.grid.shards > 1 or self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.ranks.device.type, dtype=self.compute_dtype)

    def _loss_sum(self, batch: Batch) -> torch.Tensor:
        device = self.ranks.device
        inputs = {name: value.to(device, non_blocking=True) for name, value in batch.inputs.items()}
        with self._forward():
            logits = self.model(**inputs, use_cache=False).logits
        return self.task.loss_sum(logits, batch.targets.to(device, non_blocking=True))

    def _sum(self, *values: float | torch.Tensor) -> list[float]:
        """Sums over the readers of the batch, in float64."""
        total = torch.tensor([float(v) for v in values], dtype=torch.float64, device=self.ranks.device)
        if self.ranks.world > 1:
            dist.all_reduce(total)
        return total.tolist()

    def step(self, micro_batches: Sequence[Batch | None], rate: float) -> StepResult:
        """Train on this reader's micro-batches; all readers together have the batch.

        Token-weighted: the gradient is that of the mean over every prediction of the batch, however the batch is cut.
        A micro-batch of None keeps pace with readers that have one more.
        """
        self.model.train()
        (predictions,) = self._sum(sum(b.predictions for b in micro_batches if b is not None))
        weight = self.grid.readers / predictions  # FSDP2 averages over readers, we want their sum
        loss_sum = torch.zeros((), device=self.ranks.device)
        spare = next(b for b in micro_batches if b is not None)
        for batch in micro_batches:
            loss = self._loss_sum(batch or spare) * (batch is not None)
            (loss * weight).backward()
            loss_sum += loss.detach()
        gradients = [g for part in self.parts if (g := part.gradient) is not None]
        if self.anchor:
            for part, anchor in zip(self.parts, self.anchor, strict=True):
                if part.gradient is not None:  # gradient of mu/2 |w - w_received|^2
                    part.gradient.add_(part.tensor - anchor, alpha=self.settings.proximal)
        norm = global_norm(gradients, None, self.ranks.world == 1)
        clip(gradients, norm, self.settings.clip_norm)
        for part in self.parts:
            part.tensor.grad = part.gradient
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for part in self.parts:
            part.tensor.grad = part.parameter.grad = None
        (loss_total,) = self._sum(loss_sum)
        return StepResult(loss=loss_total / predictions, gradient_norm=norm.item())

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch | None]) -> float:
        """Mean loss over this and all other readers' batches, nats per prediction; NaN without any."""
        self.model.eval()
        loss_sum, predictions, spare = torch.zeros((), dtype=torch.float64, device=self.ranks.device), 0, None
        for batch in batches:
            spare = batch or spare
            assert spare is not None, "the first batch of every reader holds a sequence"
            loss = self._loss_sum(spare)
            if batch is not None:
                loss_sum += loss.double()
                predictions += batch.predictions
        total, count = self._sum(loss_sum, predictions)
        return total / count if count else math.nan
