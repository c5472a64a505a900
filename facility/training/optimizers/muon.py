"""Muon: momentum, orthogonalised, for matrices; AdamW for embeddings, the output layer and vectors.

K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024, kellerjordan.github.io/posts/muon;
the scale 0.2 sqrt(max(rows, columns)), by which AdamW's learning rates serve, of J. Liu et al., "Muon is scalable for
LLM training", 2025, arXiv 2502.16982. Operation by operation as in `torch.optim.Muon`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from facility.exchange.checkpoints.patterns import matches_any
from facility.exchange.messages.optimizers import InnerOptimizer
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.registry import Parameter
from facility.training.optimizers.adamw import MOMENTS, moments_of
from facility.training.optimizers.groups import decay_groups
from facility.training.optimizers.newton_schulz import orthogonalise_shards
from facility.training.shards import LocalShard

DECLARATION = InnerOptimizer(
    name="muon",
    summary="orthogonalised momentum for matrices, AdamW for the rest",
    citation="Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982",
    implementation="Muon",
    parameters=(
        Parameter(name="momentum", default=0.95, at_least=0, below=1, text="Decay of the matrices' momentum."),
        Parameter(name="nesterov", default=True, text="Look one step ahead of the momentum."),
        Parameter(name="newton_schulz_steps", default=5, at_least=1, at_most=20, text="Iterations per step."),
        Parameter(
            name="precision",
            default="float32",
            choices=("float32", "bfloat16"),
            text="Precision of the iterations: float32 (layouts agree to 1e-5), or bfloat16 as in torch.optim.Muon.",
        ),
        Parameter(
            name="scale",
            default="match_rms_adamw",
            choices=("match_rms_adamw", "original"),
            text="match_rms_adamw: 0.2 sqrt(max(rows, columns)), for AdamW's learning rates; original: "
            "sqrt(max(1, rows / columns)).",
        ),
        Parameter(
            name="adamw",
            default="*embed* *wte* *wpe* *lm_head* *shared.weight *score*",
            text="Shell patterns of the matrices that AdamW trains, separated by spaces.",
        ),
    ),
    needs=("beta1, beta2 and epsilon of `training:`, for what AdamW trains",),
    state_bytes=8.0,
    shares_second_moments=True,
    matrices="momentum",
    moments_of="adamw",
    first_moments=("momentum_buffer", "exp_avg"),
)
BUFFER = "momentum_buffer"


class Muon(torch.optim.Optimizer):
    """Muon over the matrices held here, AdamW over the rest; one set of parameter groups and of state for both."""

    def __init__(self, parts: Sequence[LocalShard], settings: TrainingSettings, values: Mapping[str, Any]) -> None:
        self.values = values
        self.matrices = [part for part in parts if self._is_matrix(part.name, part.shape)]
        rest = [part for part in parts if not self._is_matrix(part.name, part.shape)]
        matrices: list[Any] = [{"params": [part.tensor for part in self.matrices]}] if self.matrices else []
        super().__init__(
            matrices or [torch.zeros(0)], {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
        )
        self.rest = torch.optim.AdamW(
            decay_groups(rest, settings.weight_decay),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=True,
        )
        self.rest.state = self.state
        self.param_groups += self.rest.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """AdamW's step, then Muon's."""
        self.rest.step()
        group, momentum = self.param_groups[0], self.values["momentum"]
        parts = [part for part in self.matrices if part.tensor.grad is not None]
        updates = []
        for part in parts:
            gradient = part.tensor.grad
            assert gradient is not None
            buffer = self.state[part.tensor].setdefault(BUFFER, torch.zeros_like(part.tensor))
            buffer.lerp_(gradient, 1 - momentum)
            updates.append(gradient.lerp(buffer, momentum) if self.values["nesterov"] else buffer)
        steps, dtype = self.values["newton_schulz_steps"], getattr(torch, self.values["precision"])
        rows = orthogonalise_shards(parts, updates, steps, dtype)
        for part, update in zip(parts, rows, strict=True):
            part.tensor.mul_(1 - group["lr"] * group["weight_decay"])
            part.tensor.add_(update, alpha=-group["lr"] * self._scale(part.shape))

    def kept(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The momentum of a matrix, both of AdamW's moments of another parameter."""
        return {BUFFER: shape} if self._is_matrix(name, shape) else dict.fromkeys(MOMENTS, shape)

    def shards(self, part: LocalShard) -> list[LocalShard]:
        """The rows of what is kept."""
        state = self.state[part.tensor]
        if not self._is_matrix(part.name, part.shape):
            return moments_of(state, part)
        buffer = state.setdefault(BUFFER, torch.zeros_like(part.tensor))
        return [dataclasses.replace(part, name=f"{BUFFER}.{part.name}", tensor=buffer)]

    def _is_matrix(self, name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and not matches_any(name, self.values["adamw"].split())

    def _scale(self, shape: tuple[int, ...]) -> float:
        rows, columns = shape
        if self.values["scale"] == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))
