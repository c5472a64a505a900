"""The norm of the gradient over the parts a rank holds, and clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def squared_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Square of the Euclidean norm of the gradient rows held here, in float64; to be summed over the model's ranks."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(list(gradients))).double().square().sum()


def clip_gradients(gradients: Sequence[torch.Tensor], norm: float, limit: float) -> None:
    """Scale the gradients so that the global norm is at most `limit` (0: leave them); no pass where it is already."""
    factor = limit / (norm + 1e-6)
    if limit > 0 and gradients and factor < 1.0:
        torch._foreach_mul_(list(gradients), factor)
