"""AdamW: Adam with decoupled weight decay, fused.

I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", ICLR 2019, arXiv 1711.05101, algorithm 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from facility.exchange.messages.optimizers import InnerOptimizer
from facility.exchange.messages.settings import TrainingSettings
from facility.training.optimizers.groups import decay_groups
from facility.training.shards import LocalShard

DECLARATION = InnerOptimizer(
    name="adamw",
    summary="Adam with decoupled weight decay",
    citation="Loshchilov and Hutter 2019, arXiv 1711.05101",
    implementation="AdamW",
    needs=("beta1, beta2, epsilon and weight_decay of `training:`",),
    state_bytes=8.0,
    shares_second_moments=True,
    first_moments=("exp_avg",),
)
MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(torch.optim.AdamW):
    """Fused AdamW over this rank's rows; matrices decay, vectors (biases, norms) do not."""

    def __init__(self, parts: Sequence[LocalShard], settings: TrainingSettings, values: Mapping[str, Any]) -> None:
        super().__init__(
            decay_groups(parts, settings.weight_decay),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=True,
        )

    def kept(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Both moments, of the parameter's shape."""
        return dict.fromkeys(MOMENTS, shape)

    def shards(self, part: LocalShard) -> list[LocalShard]:
        """Both moments' rows."""
        return moments_of(self.state[part.tensor], part)


def moments_of(state: dict[str, Any], part: LocalShard) -> list[LocalShard]:
    """Both moments of a parameter held here; made as zeros where there are none."""
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=part.tensor.device)
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(part.tensor)
    return [dataclasses.replace(part, name=f"{m}.{part.name}", tensor=state[m]) for m in MOMENTS]


@torch.no_grad()
def even_out(state: dict[str, Any], betas: Sequence[float], steps: int) -> None:
    """Make the moments of a parameter that has seen fewer steps those of so many: corrected for bias they are the same.

    A state directory has one count for all parameters. Some have seen fewer steps: one that began later, or that had no
    gradient in some.
    """
    seen = float(state["step"])
    if not 0 < seen < steps:
        return
    for moment, beta in zip(MOMENTS, betas, strict=True):
        state[moment].mul_((1 - beta**steps) / (1 - beta**seen))
    state["step"].fill_(float(steps))


@torch.no_grad()
def match_decays(state: dict[str, Any], before: Sequence[float], betas: Sequence[float]) -> None:
    """Make the moments of a parameter, which decayed by `before`, those of other decays: corrected they are the same.

    Uncorrected, a beta2 lowered from 0.999 to 0.95 after ten steps would make the next steps seven times too long.
    """
    seen = float(state["step"])
    for moment, old, new in zip(MOMENTS, before, betas, strict=True):
        if seen > 0 and old != new:
            state[moment].mul_((1 - new**seen) / (1 - old**seen))
