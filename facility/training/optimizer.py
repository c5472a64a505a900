"""AdamW over the parts a rank holds, and the global gradient norm over all parts of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from facility.exchange.settings import TrainingSettings

from .load import Part


def adamw(parts: Sequence[Part], settings: TrainingSettings) -> torch.optim.AdamW:
    """Fused AdamW over this rank's rows; matrices decay, vectors (biases, norms) do not."""
    groups = [
        {"params": [p.tensor for p in parts if len(p.shape) >= 2], "weight_decay": settings.weight_decay},
        {"params": [p.tensor for p in parts if len(p.shape) < 2], "weight_decay": 0.0},
    ]
    kept = [g for g in groups if g["params"]]
    return torch.optim.AdamW(
        kept or [torch.zeros(0)],  # a stage of frozen layers has nothing to do
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )


def global_norm(
    gradients: Sequence[torch.Tensor], group: dist.ProcessGroup | None, *, alone: bool, device: torch.device
) -> torch.Tensor:
    """Euclidean norm of the gradient of the whole model, of which each rank of `group` (None: all) holds some rows."""
    squares = torch.zeros((), dtype=torch.float32, device=device)
    if gradients:
        squares = torch.stack(torch._foreach_norm(list(gradients))).square().sum()
    if not alone:
        dist.all_reduce(squares, group=group)
    return squares.sqrt()


def clip(gradients: Sequence[torch.Tensor], norm: torch.Tensor, limit: float) -> None:
    """Scale the gradients so that the global norm is at most `limit` (0: leave them)."""
    if limit > 0 and gradients:
        torch._foreach_mul_(list(gradients), (limit / (norm + 1e-6)).clamp(max=1.0))
