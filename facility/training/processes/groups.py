"""Process groups among some of the ranks, each of which notices a hung peer after the time that the job states.

torch gives a group made without a timeout its own default (half an hour with gloo, ten minutes with NCCL), also those
that a device mesh makes for its dimensions: a rank that hangs would be waited for that long.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def group_among(everyone: Sequence[Sequence[int]], rank: int, *, timeout_seconds: float) -> dist.ProcessGroup | None:
    """This rank's group of several disjoint ones; None where it is in none of them.

    Every rank takes part in making every group, as torch asks. The group of all ranks is the one that they have.
    """
    mine, limit = None, timedelta(seconds=timeout_seconds)
    for members in everyone:
        whole = len(members) == dist.get_world_size()
        group = dist.group.WORLD if whole else dist.new_group(list(members), timeout=limit)
        if rank in members:
            assert isinstance(group, dist.ProcessGroup)
            mine = group
    return mine


def mesh_of(
    device: torch.device, grid: np.ndarray, names: tuple[str, ...], rank: int, *, timeout_seconds: float
) -> DeviceMesh:
    """All ranks as a mesh. `grid`: their numbers, one dimension for each of `names`."""
    groups = []
    for axis in range(grid.ndim):
        lines = np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])
        group = group_among(lines.tolist(), rank, timeout_seconds=timeout_seconds)
        assert group is not None, f"rank {rank} is not in the mesh {grid.tolist()}"
        groups.append(group)
    return DeviceMesh.from_group(groups, device.type, torch.from_numpy(grid), mesh_dim_names=names)
