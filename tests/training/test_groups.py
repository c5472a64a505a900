"""Laws of process groups: those of torch's own mesh, each with the stated timeout."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from facility.exchange.grid import Grid
from facility.training.parallel.assemble import model_group, tied_group
from facility.training.processes.groups import group_among, mesh_of
from facility.training.processes.ranks import from_environment
from tests.distributed import run_distributed

NAMES, SECONDS = ("replica", "stage", "shard"), 77.0
GRIDS = {
    "replicas of shards": np.arange(4).reshape(2, 1, 2),
    "pipelines of shards": np.array([[[0, 2], [3, 1]]]),
    "replicas of pipelines": np.array([[[0], [1]], [[2], [3]]]),
    "one dimension": np.arange(4).reshape(1, 1, 4),
}


def limit_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def found(rank: int, world: int) -> list[tuple[str, list[list[int]], list[list[int]], list[float]]]:
    """Of each grid: members by dimension, those of torch's mesh, and the timeouts of groups that are not the first."""
    rows = []
    for name, numbers in GRIDS.items():
        mesh = mesh_of(torch.device("cpu"), numbers, NAMES, rank, timeout_seconds=SECONDS)
        oracle = DeviceMesh("cpu", torch.from_numpy(numbers), mesh_dim_names=NAMES)
        groups = [mesh[one].get_group() for one in NAMES]
        members = [dist.get_process_group_ranks(one) for one in groups]
        expected = [dist.get_process_group_ranks(oracle[one].get_group()) for one in NAMES]
        ranks = from_environment("cpu")
        whole = model_group(Grid(ranks=numbers), ranks, SECONDS)
        tied, first = tied_group(Grid(ranks=numbers), ranks, SECONDS, tied=numbers.shape[1] > 1)
        if tied is not None:
            replica, stage, shard = Grid(ranks=numbers).place(rank)
            ends = numbers[replica, [0, -1], shard].tolist()
            assert sorted(dist.get_process_group_ranks(tied)) == sorted(ends) and first == (stage == 0)
        if whole is not None:
            own = numbers[Grid(ranks=numbers).place(rank)[0]].flatten().tolist()
            assert sorted(dist.get_process_group_ranks(whole)) == sorted(own)
        made = [one for one in (*groups, whole, tied) if one is not None and one is not dist.group.WORLD]
        rows.append((name, members, expected, [limit_of(one).total_seconds() for one in made]))
        summed = torch.tensor([float(rank)])
        dist.all_reduce(summed, group=groups[2])
        assert summed.item() == sum(members[2])
    assert group_among([[0, 1]], rank, timeout_seconds=SECONDS) is None or rank < 2
    dist.barrier()  # the first rank ends with the store that the others still connect by
    return rows


def test_groups_are_those_of_torchs_mesh_and_wait_no_longer_than_stated():
    for rank, rows in enumerate(run_distributed(found, 4)):
        for name, members, expected, limits in rows:
            assert [sorted(one) for one in members] == [sorted(one) for one in expected], (rank, name)
            assert limits and set(limits) == {SECONDS}, (rank, name)
