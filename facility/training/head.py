"""Cross entropy over a large vocabulary without ever holding the logits of all tokens.

The output layer is asked for the summed loss instead of logits: it walks over the positions in chunks, keeps one number
(the log of the sum of exponentials) of each, and computes a chunk's logits again in backward. Peak memory falls from
three times tokens x vocabulary in float32 (logits, their log-softmax, its gradient) to the same of one chunk; a third
of the output layer's work is done twice. The idea is that of Wijmans et al. 2024 (Cut Your Losses, arXiv 2411.09009,
section 4) and of Liger Kernel (Hsu et al. 2024, arXiv 2410.10989, section 3.2), here without kernels of its own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from facility.exchange.errors import ConfigurationError
from facility.exchange.settings import TrainingSettings

from .tasks import IGNORED

LARGE_BYTES = 256 * 2**20
"""Logits of one forward pass in float32 from which on they are computed in chunks."""
CHUNK_BYTES = 64 * 2**20
"""Logits of one chunk in float32."""
CHUNKS = 4
"""Chunks of a forward pass at the least."""


@dataclass(frozen=True, kw_only=True)
class HeadChoice:
    """How the loss is computed, and why."""

    rows: int
    """Positions of a chunk; 0: all logits at once."""
    reason: str


def rows_of(positions: int, vocabulary: int) -> int:
    """Positions of a chunk: as many as `CHUNK_BYTES` hold, a quarter of all at most, one at least."""
    return max(1, min(CHUNK_BYTES // (4 * vocabulary), -(-positions // CHUNKS)))


def choose_head(
    settings: TrainingSettings, config: Any, factory: Any, attention: str, *, sequences: int, tokens: int
) -> HeadChoice:
    """For micro-batches of so many sequences and tokens. Raises `ConfigurationError` where chunks are demanded of a
    model whose loss is not its output layer's alone."""
    if settings.chunked_loss == "never":
        return HeadChoice(rows=0, reason="all logits at once, as training.chunked_loss says")
    vocabulary = getattr(config, "vocab_size", 0) or 1
    size = 4 * sequences * tokens * vocabulary
    told = f"the logits of a forward pass ({sequences} x {tokens} positions x {vocabulary}) are {size / 2**20:.0f} MiB"
    if settings.chunked_loss == "auto" and size <= LARGE_BYTES:
        return HeadChoice(rows=0, reason=f"all logits at once: {told}")
    obstacle = refuses(config, factory, attention)
    if obstacle and settings.chunked_loss == "always":
        raise ConfigurationError(f"training.chunked_loss is 'always', but {obstacle}; use 'auto' or 'never'")
    if obstacle:
        return HeadChoice(rows=0, reason=f"all logits at once, although {told}: {obstacle}")
    rows = rows_of(sequences * tokens, vocabulary)
    return HeadChoice(rows=rows, reason=f"loss in chunks of {rows} positions: {told}")


def refuses(config: Any, factory: Any, attention: str) -> str:
    """Why the output layer cannot compute the loss itself; empty where it can.

    One forward pass without memory (FakeTensor) shows whether what the layer returns is what the model returns: a
    model that scales or caps its logits afterwards does something else.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = copy.deepcopy(config)
    config.use_cache = False
    returned: list[Any] = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = factory.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            return f"{type(model).__name__} has no linear output layer over its vocabulary"
        head.register_forward_hook(lambda module, args, output: returned.append(output))
        logits = model.eval()(input_ids=torch.zeros(1, 8, dtype=torch.int64)).logits
    if len(returned) != 1 or returned[0] is not logits:
        return f"{type(model).__name__} changes its logits after the output layer"
    return ""


class ChunkedHead:
    """Makes a model's output layer return the summed loss over `targets` as a tensor of one element."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        head = model.get_output_embeddings()  # type: ignore[operator]
        assert isinstance(head, nn.Linear)
        self.head, self.rows = head, rows
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
            loss = ChunkedCrossEntropy.apply(
                hidden.reshape(-1, hidden.shape[-1]), weight, bias, targets.reshape(-1), self.rows
            )
        return loss.reshape(1)


class ChunkedCrossEntropy(torch.autograd.Function):
    """sum over positions of log(sum(exp(x))) - x[target], x = hidden weight^T + bias, in float32.

    Its gradient by x is softmax(x) - onehot(target), zero where the target is `IGNORED`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        rows: int,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        normalisers = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for first in range(0, len(hidden), rows):
            logits = torch.nn.functional.linear(hidden[first : first + rows], weight, bias).float()
            wanted = targets[first : first + rows]
            normaliser = torch.logsumexp(logits, dim=1)
            normalisers[first : first + rows] = normaliser
            counted = wanted != IGNORED
            picked = logits.gather(1, wanted.where(counted, 0)[:, None])[:, 0]
            total += ((normaliser - picked) * counted).sum()
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers)
        ctx.rows = rows
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight, bias, targets, normalisers = ctx.saved_tensors
        by_hidden, by_weight, by_bias = ctx.needs_input_grad[:3]
        hidden_gradient = torch.empty_like(hidden) if by_hidden else None
        # Chunks of a half-precision product are added in float32: one rounding, as in one product.
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if by_weight else None
        bias_gradient = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if by_bias else None
        for first in range(0, len(hidden), ctx.rows):
            piece = hidden[first : first + ctx.rows]
            wanted = targets[first : first + ctx.rows]
            counted = (wanted != IGNORED)[:, None]
            by_logits = torch.nn.functional.linear(piece, weight, bias).float()
            by_logits.sub_(normalisers[first : first + ctx.rows, None]).exp_()
            place = wanted[:, None].where(counted, 0)
            by_logits.scatter_(1, place, by_logits.gather(1, place) - 1.0)
            by_logits.mul_(counted * gradient)
            if bias_gradient is not None:
                bias_gradient += by_logits.sum(0)
            rounded = by_logits.to(hidden.dtype)
            if hidden_gradient is not None:
                torch.mm(rounded, weight, out=hidden_gradient[first : first + ctx.rows])
            if weight_gradient is None:
                continue
            if rounded.dtype == torch.float32:
                weight_gradient.addmm_(rounded.T, piece)
            else:
                weight_gradient += rounded.T @ piece
        return hidden_gradient, weight_gradient, bias_gradient, None, None
