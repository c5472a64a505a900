"""Forward and backward over a whole model, or its shards (a pipeline: `facility.training.parallel.pipeline`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from facility.exchange.checkpoints.layouts import no_gradient, unreached_shards
from facility.exchange.errors import InputError
from facility.training.batch_norm import keeping_statistics
from facility.training.data.tasks import Batch, Task
from facility.training.head import ChunkedHead
from facility.training.monitor.clock import Clock
from facility.training.router_loss import router_loss


class Compute(Protocol):
    """What the engine needs of a layout."""

    modules: list[nn.Module]
    """What this rank holds."""
    tells_loss: bool
    """True if this rank knows the loss: the head is here."""
    task: Task

    def train(self, batches: Sequence[Batch], weight: float) -> torch.Tensor:
        """Gradients of `weight` times the summed loss of all batches; returns the summed loss where it is known."""

    def evaluate(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed loss of one batch and its number of right answers, without gradients; 0 where they are not known, and
        no answers of a task that has none."""


class Precision:
    """How an unsharded module computes in half precision; FSDP2 casts by itself."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, casts_itself: bool) -> None:
        self.device, self.dtype = device, dtype
        self.off = casts_itself or dtype == torch.float32

    def __call__(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.off else torch.autocast(self.device.type, dtype=self.dtype)


def logits_of(output: Any, model: nn.Module) -> torch.Tensor:
    """What a model says of each class or token. Raises `InputError` where it does not."""
    if getattr(output, "logits", None) is None:
        raise InputError(
            f"{type(model).__name__} returns a {type(output).__name__} without logits: transformers has no head for it "
            "that could be trained"
        )
    return output.logits


@contextmanager
def refusing_unreached_shards(model: nn.Module) -> Iterator[None]:
    """Raise `InputError` where a model uses weights of a block without calling the block, which gathers its shards.

    As SqueezeBERT does in its forward pass, and Reformer in the backward pass that it wrote itself.
    """
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise InputError(unreached_shards(model)) from None


def refuse_without_gradient(loss: torch.Tensor, model: nn.Module) -> None:
    """Raise `InputError` where nothing that is trained changes the loss.

    As in Reformer with adapters: autograd leaves its own backward pass out where its input, frozen embeddings, needs
    no gradient.
    """
    if not loss.requires_grad:
        raise InputError(no_gradient(model))


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
        """`replicated`: the model among its replicas, which exchange gradients at a step's last micro-batch, so that
        they may make unlike numbers. `chunked`: where the model returns the summed loss instead of logits."""
        self.task, self.precision, self.clock = task, precision, clock
        self.replicated, self.chunked = replicated, chunked
        self.modules: list[nn.Module] = [model]
        self.device = precision.device

    def _forward(self, batch: Batch, model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """The summed loss; what the model returned, and the targets, on the device."""
        inputs = {name: value.to(self.device, non_blocking=True) for name, value in batch.inputs.items()}
        inputs = self.task.on_device(inputs)
        targets = batch.targets.to(self.device, non_blocking=True)
        if self.chunked is not None:
            self.chunked.targets = targets
        with self.precision(), refusing_unreached_shards(self.modules[0]):
            output = model(**inputs)
        logits = logits_of(output, self.modules[0])
        loss = logits.float().sum() if self.chunked is not None else self.task.loss_sum(logits, targets)
        return loss, targets, output

    def train(self, batches: Sequence[Batch], weight: float) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches):
            waits = self.replicated is not None and number < len(batches) - 1
            with self.replicated.no_sync() if self.replicated is not None and waits else nullcontext():
                empty = not batch.predictions
                with self.clock("forward"), keeping_statistics(self.modules[0]) if empty else nullcontext():
                    loss, _, output = self._forward(batch, self.replicated or self.modules[0])
                    balance = router_loss(self.modules[0], output)
                with self.clock("backward"), refusing_unreached_shards(self.modules[0]):
                    whole = loss if balance is None else loss + balance * batch.predictions
                    refuse_without_gradient(whole, self.modules[0])
                    (whole * weight).backward()
            total += loss.detach()
        return total

    def evaluate(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss, targets, output = self._forward(batch, self.modules[0])
        none = torch.zeros((), device=self.device)
        return loss, self.task.correct(output.logits, targets) if self.task.answers else none
