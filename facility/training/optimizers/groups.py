"""Parameter groups over shards, and sums over the ranks that share a parameter's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from facility.training.shards import LocalShard


def decay_groups(parts: Sequence[LocalShard], weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: matrices decay, vectors (biases, norms) do not.

    A stage of frozen layers has nothing to train, and torch wants a parameter: an empty one.
    """
    groups = [
        {"params": [p.tensor for p in parts if len(p.shape) >= 2], "weight_decay": weight_decay},
        {"params": [p.tensor for p in parts if len(p.shape) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]] or [{"params": [torch.zeros(0)], "weight_decay": 0.0}]


def group_of(part: LocalShard) -> dist.ProcessGroup | None:
    """The ranks among which the parameter's rows are divided, in order of rows; None: they lie here whole."""
    parameter = part.parameter
    if not isinstance(parameter, DTensor):
        return None
    for dimension, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard) and parameter.device_mesh.size(dimension) > 1:
            return parameter.device_mesh.get_group(dimension)
    return None


def sum_over_shards(values: Sequence[torch.Tensor], parts: Sequence[LocalShard]) -> None:
    """Add up `values[i]` in place over the ranks that divide `parts[i]`: one all-reduce for each group of ranks."""
    by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for value, part in zip(values, parts, strict=True):
        if (group := group_of(part)) is not None:
            by_group.setdefault(group, []).append(value)
    for group, mine in by_group.items():
        flat = torch.cat([value.reshape(-1) for value in mine])
        dist.all_reduce(flat, group=group)
        for value, total in zip(mine, flat.split([value.numel() for value in mine]), strict=True):
            value.copy_(total.view_as(value))
