"""DoRA's magnitudes: one number per output of an adapted layer, beside its low-rank factors.

S.-Y. Liu et al., "DoRA: weight-decomposed low-rank adaptation", ICML 2024, arXiv 2402.09353: W' = m (W + s B A) /
||W + s B A||, row by row, with the norm taken as a constant in backward (section 4.3). m begins as the norms of the
rows of W, so that the adapter begins by changing nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.checkpoints.conversion import Conversion
from facility.training.shards import LocalShard, load_shards


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """The weight that a magnitude belongs to."""

    name: str
    """Name of the weight in the base model."""
    shape: tuple[int, ...]
    transposed: bool
    """Inputs by outputs (GPT-2's Conv1D), not outputs by inputs."""


@torch.no_grad()
def initialise_magnitudes(part: LocalShard, weight: Adapted, base: Checkpoint, conversion: Conversion | None) -> None:
    """Fill the magnitudes held here with the norms of the base's rows, one for each output."""
    rows = part.tensor.shape[0]
    held = torch.empty(weight.shape if weight.transposed else (rows, *weight.shape[1:]), dtype=torch.float32)
    shard = dataclasses.replace(
        part,
        name=weight.name,
        shape=weight.shape,
        first=0 if weight.transposed else part.first,
        tensor=held,
        parameter=nn.Parameter(held, requires_grad=False),
    )
    load_shards([shard], base, conversion)
    norms = torch.linalg.norm(held.T if weight.transposed else held, dim=1)
    part.tensor.copy_(norms[part.first : part.first + rows] if weight.transposed else norms)
