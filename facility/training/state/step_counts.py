"""How many steps Adam's moments have seen, which they are corrected for bias by.

What a round leaves has one count for all parameters, and the decays (beta1, beta2) that the moments were made with.
Corrected for bias, m / (1 - beta^t), no moment here changes: only what it is stored as. A pause in the middle of a
round keeps the count of each parameter, so that the round ends in the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.training.optimizers.adamw import even_out, match_decays
from facility.training.optimizers.protocol import Optimizer
from facility.training.shards import LocalShard

COUNT = "step"
"""In a pause: of each parameter's moments, the steps that they have seen."""


def counts_of(optimizer: Optimizer, parts: Sequence[LocalShard]) -> list[LocalShard]:
    """Steps that the moments of each parameter have seen, a number with the rank of its first row; 0 where nothing
    counts them."""
    return [
        dataclasses.replace(
            part,
            name=f"{COUNT}.{part.name}",
            shape=(),
            tensor=optimizer.state[part.tensor].get("step", torch.zeros(())),
        )
        for part in parts
        if part.first == 0 and (part.tensor.numel() or not part.shape)
    ]


def fill_counts(
    optimizer: Optimizer, parts: Sequence[LocalShard], steps: int, stored: Checkpoint, prefix: str = ""
) -> None:
    """Let each parameter's moments be those of `steps` steps, or of its own count where one is stored, under
    `prefix`."""
    for part in parts:
        if "step" in (held := optimizer.state[part.tensor]):
            own = f"{prefix}{COUNT}.{part.name}"
            held["step"].fill_(float(stored.read(own) if own in stored.tensors else steps))


def count_alike(optimizer: Optimizer, parts: Sequence[LocalShard], steps: int) -> None:
    """Let Adam's moments of every parameter held here be those of `steps` steps."""
    betas = betas_of(optimizer)
    for part in parts:
        if id(part.tensor) in betas and "step" in (held := optimizer.state.get(part.tensor, {})):
            even_out(held, betas[id(part.tensor)], steps)


def decay_alike(optimizer: Optimizer, parts: Sequence[LocalShard], before: Sequence[float] | None) -> None:
    """Let Adam's moments held here, made with the decays `before`, be those of the decays that are set now.

    None: an earlier version, which did not say.
    """
    betas = betas_of(optimizer)
    for part in parts if before is not None else ():
        if id(part.tensor) in betas and "step" in (held := optimizer.state.get(part.tensor, {})):
            match_decays(held, before or (), betas[id(part.tensor)])


def betas_of(optimizer: Optimizer) -> dict[int, Sequence[float]]:
    """The decays of each parameter that Adam trains, by the identity of its tensor."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    return {id(tensor): group["betas"] for group in groups for tensor in group["params"] if "betas" in group}


def steps_seen(optimizer: Optimizer, parts: Sequence[LocalShard], counted: int) -> int:
    """Steps that the moments held here have seen, of those that were `counted`; these where no moment counts them."""
    found = [float(held["step"]) for part in parts if "step" in (held := optimizer.state.get(part.tensor, {}))]
    return min(counted, round(max(found))) if found else counted
