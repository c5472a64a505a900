"""AdamW over the parts a rank holds, and the norm of the gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from facility.exchange.messages.settings import TrainingSettings
from facility.training.shards import LocalShard


def adamw(parts: Sequence[LocalShard], settings: TrainingSettings) -> torch.optim.AdamW:
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


def squared_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Square of the Euclidean norm of the gradient rows held here, in float64; to be summed over the model's ranks."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(list(gradients))).double().square().sum()


def clip(gradients: Sequence[torch.Tensor], norm: float, limit: float) -> None:
    """Scale the gradients so that the global norm is at most `limit` (0: leave them); no pass where it is already."""
    factor = limit / (norm + 1e-6)
    if limit > 0 and gradients and factor < 1.0:
        torch._foreach_mul_(list(gradients), factor)
