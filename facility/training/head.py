"""Cross entropy over a large vocabulary without ever holding the logits of all tokens.

The output layer is asked for the summed loss instead of logits: it walks over the positions in chunks and computes a
chunk's gradients while its logits are there (Liger Kernel: Hsu et al. 2024, arXiv 2410.10989, section 3.2; here without
kernels of its own). Peak memory falls from three times tokens x vocabulary in float32 (logits, their log-softmax, its
gradient) to one chunk and a second gradient of the output layer's weight; on a CPU, whose caches hold a chunk but not
the logits of all, it is faster too. Where several forward passes wait for their backward (pipelines), a chunk's logits
are computed again in backward instead of keeping a gradient of the weight for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from facility.exchange.errors import ConfigurationError
from facility.exchange.memory.chunks import obstacle_to_chunks, wanted_rows
from facility.exchange.messages.settings import TrainingSettings
from facility.training.data.tasks import IGNORED

Softmax = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]
"""Of a chunk's logits, the targets' columns, which of them count, and whether a gradient is wanted."""


@dataclass(frozen=True, kw_only=True)
class HeadChoice:
    """How the loss is computed, and why."""

    rows: int
    """Positions of a chunk; 0: all logits at once."""
    reason: str


def choose_head(
    settings: TrainingSettings,
    config: Any,
    factory: Any,
    attention: str,
    *,
    sequences: int,
    tokens: int,
    device: str,
) -> HeadChoice:
    """For micro-batches of this shape. Raises `ConfigurationError` where chunks are demanded of a
    model whose loss is not its output layer's alone."""
    if settings.chunked_loss == "never":
        return HeadChoice(rows=0, reason="all logits at once, as training.chunked_loss says")
    vocabulary = getattr(config, "vocab_size", 0) or 1
    size = 4 * sequences * tokens * vocabulary
    sizes = f"the logits of a forward pass ({sequences} x {tokens} positions x {vocabulary}) are {size / 2**20:.0f} MiB"
    rows = wanted_rows(settings, sequences * tokens, vocabulary, device)
    if not rows:
        return HeadChoice(rows=0, reason=f"all logits at once: {sizes}")
    obstacle = obstacle_to_chunks(config, factory, attention)
    if obstacle and settings.chunked_loss == "always":
        raise ConfigurationError(f"training.chunked_loss is 'always', but {obstacle}; use 'auto' or 'never'")
    if obstacle:
        return HeadChoice(rows=0, reason=f"all logits at once, although {sizes}: {obstacle}")
    return HeadChoice(rows=rows, reason=f"loss in chunks of {rows} positions: {sizes}")


class ChunkedHead:
    """Makes a model's output layer return the summed loss over `targets` as a tensor of one element."""

    def __init__(self, model: nn.Module, rows: int, *, later: bool = False, compiled: bool = False) -> None:
        """`later`: gradients are computed in backward, for a pipeline that has several losses waiting for theirs.

        `compiled`: softmax and its gradient in one kernel on a GPU, in place of eight passes over a chunk's logits."""
        head = model.get_output_embeddings()  # type: ignore[operator]
        assert isinstance(head, nn.Linear)
        self.head, self.rows, self.later = head, rows, later
        self.softmax: Softmax = torch.compile(fused_softmax, dynamic=False) if compiled else softmax
        self.targets: torch.Tensor | None = None
        """Of the forward pass that comes next."""
        head.forward = self._loss  # type: ignore[method-assign, assignment]

    def _loss(self, hidden: torch.Tensor) -> torch.Tensor:
        targets, self.targets = self.targets, None
        assert targets is not None, "the targets come before the forward pass"
        weight: torch.Tensor = self.head.weight
        bias: torch.Tensor | None = self.head.bias
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = bias if bias is None else bias.to(dtype)
        with torch.autocast(kind, enabled=False):
            flat, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
            if not torch.is_grad_enabled():
                return walk(flat, weight, bias, wanted, self.rows, (False, False, False))[0]
            fused = self.softmax if kind == "cuda" else softmax
            loss: torch.Tensor = ChunkedCrossEntropy.apply(flat, weight, bias, wanted, self.rows, self.later, fused)
        return loss


def softmax(
    logits: torch.Tensor, place: torch.Tensor, counted: torch.Tensor, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk's summed loss and its gradient by the logits in float32, where `gradient`; overwrites float32 logits."""
    logits = logits.float()
    normaliser, loss = summed_loss(logits, place, counted)
    if not gradient:
        return loss, logits
    by_logits = logits.sub_(normaliser).exp_()
    by_logits.scatter_(1, place, by_logits.gather(1, place) - 1.0)
    by_logits *= counted
    return loss, by_logits


def fused_softmax(
    logits: torch.Tensor, place: torch.Tensor, counted: torch.Tensor, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax`, written for a compiler: nothing in place, the gradient in the dtype of the logits."""
    whole = logits.float()
    normaliser, loss = summed_loss(whole, place, counted)
    if not gradient:
        return loss, logits
    here = torch.arange(logits.shape[1], device=logits.device)[None] == place
    by_logits = ((whole - normaliser).exp() - here.to(torch.float32)) * counted
    return loss, by_logits.to(logits.dtype)


def summed_loss(logits: torch.Tensor, place: torch.Tensor, counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's log(sum(exp(x))), of float32 logits, and the loss of the rows that count."""
    normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
    return normaliser, ((normaliser - logits.gather(1, place)) * counted).sum()


@torch.no_grad()
def walk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    rows: int,
    wanted: tuple[bool, bool, bool],
    fused: Softmax = softmax,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The summed loss, of one element, and its gradients by hidden, weight and bias where `wanted`; one chunk's logits
    at a time.

    loss = sum over positions of log(sum(exp(x))) - x[target], x = hidden weight^T + bias, in float32; its gradient by x
    is softmax(x) - onehot(target), zero where the target is `IGNORED`. Chunks of a half-precision product are added in
    float32: one rounding, as in one product.
    """
    by_hidden = torch.empty_like(hidden) if wanted[0] else None
    by_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wanted[1] else None
    by_bias = torch.zeros(len(weight), dtype=torch.float32, device=weight.device) if wanted[2] else None
    total = torch.zeros(1, dtype=torch.float32, device=hidden.device)
    whole, on_gpu = hidden.dtype == torch.float32, hidden.device.type == "cuda"
    buffer = torch.empty((rows, len(weight)), dtype=hidden.dtype, device=hidden.device)  # one for all: no page faults
    for first in range(0, len(hidden), rows):
        piece = hidden[first : first + rows]
        target = targets[first : first + rows, None]
        counted = target != IGNORED
        logits = torch.mm(piece, weight.T, out=buffer[: len(piece)])
        if bias is not None:
            logits += bias
        loss, by_logits = fused(logits, target.where(counted, 0), counted, any(wanted))
        total += loss
        if not any(wanted):
            continue
        if by_bias is not None:
            by_bias += by_logits.sum(0, dtype=torch.float32)
        by_logits = by_logits.to(hidden.dtype)
        if by_hidden is not None:
            torch.mm(by_logits, weight, out=by_hidden[first : first + rows])
        if by_weight is not None and whole:
            by_weight.addmm_(by_logits.T, piece)
        elif by_weight is not None and on_gpu:  # added in the product itself
            torch.addmm(by_weight, by_logits.T, piece, out_dtype=torch.float32, out=by_weight)
        elif by_weight is not None:
            by_weight += by_logits.T @ piece
    return total, [by_hidden, by_weight, by_bias]


class ChunkedCrossEntropy(torch.autograd.Function):
    """`walk` with its gradients: at once with the loss, or (`later`) on a second walk in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        rows: int,
        later: bool,
        fused: Softmax,
    ) -> torch.Tensor:
        ctx.rows, ctx.later, ctx.fused = rows, later, fused
        wanted = (False,) * 3 if later else ctx.needs_input_grad[:3]
        loss, gradients = walk(hidden, weight, bias, targets, rows, wanted, fused)
        ctx.save_for_backward(*((hidden, weight, bias, targets) if later else gradients))
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        found = list(ctx.saved_tensors)
        if ctx.later:
            hidden, weight, bias, targets = found
            _, found = walk(hidden, weight, bias, targets, ctx.rows, ctx.needs_input_grad[:3], ctx.fused)
        return *(None if g is None else g.mul_(gradient) for g in found), None, None, None, None
