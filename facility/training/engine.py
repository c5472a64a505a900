"""One optimizer step: gradients from the layout, exchange, clip, update; and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from facility.exchange.errors import InputError
from facility.exchange.messages.settings import TrainingSettings
from facility.sync.protocol import Synchroniser
from facility.training.data.tasks import Batch
from facility.training.gradients import clip_gradients, squared_norm
from facility.training.loss_scale import LossScale
from facility.training.monitor.clock import Clock
from facility.training.optimizers.protocol import optimizer_of
from facility.training.parallel.arrange import Layout
from facility.training.parallel.assemble import Assembly
from facility.training.parallel.shard import drop_gathered
from facility.training.processes.ranks import Ranks
from facility.training.trained_rank import TrainedRank


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of an optimizer step."""

    loss: float
    """Mean over the predictions of the batch, nats."""
    gradient_norm: float
    """Norm of all gradients before clipping."""
    predictions: int
    rate: float
    """Learning rate."""
    skipped: bool
    """Loss or gradient was not finite: the weights are as before."""


class Engine:
    """Drives what a rank holds through training and evaluation."""

    predicted_memory_bytes = 0
    """What this rank was expected to need at most, in the measure of `account.peak_memory_bytes`; 0: not predicted."""

    def __init__(
        self, assembly: Assembly, layout: Layout, ranks: Ranks, settings: TrainingSettings, clock: Clock
    ) -> None:
        self.assembly, self.layout, self.ranks, self.settings, self.clock = assembly, layout, ranks, settings, clock
        self.parts = [part for part in assembly.parts if part.trained]
        self.compute = assembly.compute
        self.optimizer = optimizer_of(self.parts, settings)
        self.trained_rank = TrainedRank(self.parts, settings.lora)
        self.correct: Callable[[float], None] | None = None
        """Moves the weights after a step of that learning rate (`facility.training.drift`)."""
        self.anchor = [part.tensor.detach().clone() for part in self.parts] if settings.proximal else []
        _, row, _ = layout.grid.place(ranks.rank)
        self.counts = row == 0
        """True if this rank counts its predictions; the other stages of its pipeline read the same."""
        self.together = layout.grid.replicas == 1 or layout.replicas_in_mesh
        """True if replicas step in lockstep on a shared batch, False if a policy of `facility.sync` joins them."""
        self.scale = LossScale(adapts=settings.compute_dtype == "float16")
        self.skipped = self.bad_in_a_row = 0
        self.accuracy: float | None = None
        """Share of right answers in the latest evaluation; None for a task that has none."""

    def _sum(self, *values: float | torch.Tensor, everywhere: bool = False) -> list[float]:
        """Sums in float64 over the ranks that make a step together, or over all.

        What the host knows is summed by gloo on the CPU, without waiting for the GPU.
        """
        on_host = not any(isinstance(v, torch.Tensor) for v in values)
        device = torch.device("cpu") if on_host else self.ranks.device
        total = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in values])
        if self.ranks.world > 1:
            with self.clock("communication"):
                group = self.ranks.group if self.together or everywhere else self.assembly.model_group
                dist.all_reduce(total, group=group)
        return total.tolist()

    def agree_to_stop(self, wanted: bool) -> bool:
        """True if any rank of this replica wants to stop; the same on each."""
        return self._sum(float(wanted))[0] > 0

    def step(self, batches: Sequence[Batch], rate: Callable[[], float], sync: Synchroniser | None = None) -> StepResult:
        """Train on this rank's micro-batches; all data-parallel ranks together have the batch.

        `rate` is asked for the learning rate after gradients are exchanged: replicas that exchange agree on progress.

        Token-weighted: the gradient is that of the mean over every prediction of the batch, however the batch is cut.
        """
        (predictions,) = self._sum(sum(batch.predictions for batch in batches) if self.counts else 0)
        loss_sum = self._backward(batches, predictions, sync)
        gradients = self._collect_gradients()
        if sync is not None:
            with self.clock("communication"):
                sync.reduce_gradients(predictions)
            self.trained_rank.drop_gradients()  # of what was sent while the backward pass went on, all came back
        return self._finish(gradients, loss_sum, predictions, rate)

    def step_with(self, gradients: Sequence[torch.Tensor], rate: Callable[[], float]) -> StepResult:
        """Make a step with gradients that were made elsewhere, equal on all ranks that step together."""
        for part, gradient in zip(self.parts, gradients, strict=True):
            part.parameter.grad = gradient.to(part.parameter.dtype)
        return self._finish(self._collect_gradients(), torch.zeros((), device=self.ranks.device), 0, rate)

    def _finish(
        self, gradients: Sequence[torch.Tensor], loss_sum: torch.Tensor, predictions: float, rate: Callable[[], float]
    ) -> StepResult:
        """Clip, update and forget the gradients of a step."""
        with self.clock("optimizer"):
            loss_total, norm = self._measure(loss_sum)
            finite, chosen = math.isfinite(loss_total) and math.isfinite(norm), rate()
            if finite:
                clip_gradients(gradients, norm, self.settings.clip_norm)
                self._update(chosen)
            for part in self.parts:
                part.tensor.grad = part.parameter.grad = None
        self.clock.settle()
        self._count(finite, norm, loss_total)
        return StepResult(
            loss=loss_total / predictions if predictions else 0.0,
            gradient_norm=norm,
            predictions=int(predictions),
            rate=chosen,
            skipped=not finite,
        )

    def _backward(self, batches: Sequence[Batch], predictions: float, sync: Synchroniser | None) -> torch.Tensor:
        """Accumulate this rank's gradients of the mean loss; returns the summed loss where the head is here."""
        for module in self.compute.modules:
            module.train()
        if sync is not None and not self.scale.adapts and not self.assembly.tied:
            # What the backward pass leaves is what is exchanged, so that may begin while it goes on.
            sync.before_step(predictions)
        averaged = self.layout.grid.data_ranks if self.together else self.layout.grid.shards
        return self.compute.train(batches, averaged / max(1.0, predictions) * self.scale.value)

    def _collect_gradients(self) -> list[torch.Tensor]:
        """Hand the rows of each gradient to the optimizer's tensors, unscaled; returns those that are present."""
        with self.clock("communication"):
            self._tie()
        self.trained_rank.drop_gradients()
        gradients = [part.gradient for part in self.parts]
        for part, gradient in zip(self.parts, gradients, strict=True):
            part.tensor.grad = gradient
        present = [g for g in gradients if g is not None]
        if self.scale.value != 1.0 and present:
            torch._foreach_mul_(present, 1.0 / self.scale.value)
        return present

    def _measure(self, loss_sum: torch.Tensor) -> tuple[float, float]:
        """Add the proximal term's gradient; returns the batch's summed loss and the gradient's norm."""
        for part, anchor in zip(self.parts, self.anchor, strict=False):
            if part.gradient is not None:  # gradient of mu/2 |w - w_received|^2
                part.gradient.add_(part.tensor.detach() - anchor, alpha=self.settings.proximal)
        counted = [p.gradient for p in self.parts if p.gradient is not None and not p.copy]
        # Replicas that step together hold the same gradient: each counts its part of the squares.
        copies = self.layout.grid.replicas if self.together else 1
        loss_total, squares = self._sum(
            loss_sum if self.compute.tells_loss else 0.0, squared_norm(counted, self.ranks.device) / copies
        )
        return loss_total, math.sqrt(squares) if squares >= 0 else math.nan

    def _update(self, rate: float) -> None:
        """One optimizer step at the learning rate `rate`."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.trained_rank.unchanged():
            self.optimizer.step()
            if self.correct is not None:
                self.correct(rate)

    def _tie(self) -> None:
        """A tied head away from its embedding: both ranks take the sum of both gradients."""
        for part in sorted(self.assembly.tied, key=lambda p: p.name):
            gradient = part.gradient
            assert gradient is not None
            dist.all_reduce(gradient, group=self.assembly.tied_group)

    def _count(self, finite: bool, norm: float, loss: float) -> None:
        """Skipped steps; in half precision (fp16) a gradient that overflows first lowers the loss scale."""
        if finite:
            self.bad_in_a_row = 0
            self.scale.step_was_good()
            return
        self.skipped += 1
        if math.isfinite(loss) and self.scale.overflowed():
            return
        self.bad_in_a_row += 1
        if self.bad_in_a_row >= self.settings.limits.bad_losses:
            raise InputError(
                f"{self.bad_in_a_row} steps in a row gave a loss ({loss}) or gradient norm ({norm}) "
                "that is not finite: training diverged; lower training.learning_rate, "
                "or clip (training.clip_norm), or train in float32"
            )

    @torch.no_grad()
    def loss_of(self, batch: Batch) -> float:
        """Mean loss of one batch that every rank holds alike, nats per prediction; the same answer on each rank."""
        for module in self.compute.modules:
            module.eval()
        with self.clock.stopped():
            loss = self.compute.evaluate(batch)[0].double()
        drop_gathered(self.compute.modules)
        knows_loss = self.compute.tells_loss
        total, count = self._sum(loss if knows_loss else torch.zeros_like(loss), float(knows_loss), everywhere=True)
        return total / count / batch.predictions

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over the batches of all data-parallel ranks, nats per prediction; NaN without any.

        `accuracy` is that of the same batches.
        """
        for module in self.compute.modules:
            module.eval()
        found, predictions = torch.zeros(2, dtype=torch.float64, device=self.ranks.device), 0
        with self.clock.stopped():
            for batch in batches:
                found += torch.stack(self.compute.evaluate(batch)).double()
                predictions += batch.predictions
        drop_gathered(self.compute.modules)
        loss_sum, right = found if self.compute.tells_loss else torch.zeros_like(found)
        total, correct, count = self._sum(loss_sum, right, predictions if self.counts else 0, everywhere=True)
        self.accuracy = correct / count if count and self.compute.task.answers else None
        return total / count if count else math.nan

    @torch.no_grad()
    def evaluate_blocks(self, batches: Iterable[tuple[int, Batch]], blocks: int) -> tuple[np.ndarray, np.ndarray]:
        """Summed loss and predictions of each block, from batches of one block each; equal on all ranks.

        `accuracy` is that of all blocks.
        """
        for module in self.compute.modules:
            module.eval()
        found = torch.zeros(3, blocks, dtype=torch.float64, device=self.ranks.device)
        with self.clock.stopped():
            for number, batch in batches:
                loss, right = self.compute.evaluate(batch)
                if number < blocks:
                    found[0, number] += loss.double() if self.compute.tells_loss else 0.0
                    found[1, number] += batch.predictions if self.counts else 0
                    found[2, number] += right.double() if self.compute.tells_loss else 0.0
        drop_gathered(self.compute.modules)
        if self.ranks.world > 1:
            dist.all_reduce(found, group=self.ranks.group)
        losses, predictions, right_ones = found.cpu().numpy()
        count = predictions.sum()
        self.accuracy = float(right_ones.sum() / count) if count and self.compute.task.answers else None
        return losses, predictions.astype(np.int64)
