"""The rank grid of one facility: one reshaped `arange`, or what a plan says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from facility.exchange.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Grid:
    """`ranks[replica, stage, shard]` is the rank that holds that shard of that stage of that copy of the model."""

    ranks: np.ndarray

    @property
    def replicas(self) -> int:
        return self.ranks.shape[0]

    @property
    def stages(self) -> int:
        """Ranks that one pipeline passes through; with an interleaved schedule each holds several stages."""
        return self.ranks.shape[1]

    @property
    def shards(self) -> int:
        return self.ranks.shape[2]

    @property
    def readers(self) -> int:
        """Parts that a batch is cut into: every (replica, shard) reads its own."""
        return self.replicas * self.shards

    def place(self, rank: int) -> tuple[int, int, int]:
        """(replica, stage, shard) of a rank."""
        found = np.argwhere(self.ranks == rank)
        assert len(found) == 1, f"rank {rank} is in the grid {len(found)} times"
        replica, stage, shard = found[0].tolist()
        return replica, stage, shard

    def reader(self, rank: int) -> int:
        """Which part of the batch a rank reads; the stages of one pipeline read the same."""
        replica, _, shard = self.place(rank)
        return replica * self.shards + shard


def grid(world: int, *, replicas: int = 1, stages: int = 1, order: list[list[int]] | None = None) -> Grid:
    """Arrange `world` ranks; shards are what replicas and stages leave over, and lie on neighbouring ranks.

    `order[stage][replica]` places whole shard groups where a plan says so.
    """
    if replicas < 1 or stages < 1 or world % (replicas * stages):
        raise ConfigurationError(
            f"{world} ranks cannot be arranged as {replicas} replicas x {stages} stages: "
            f"the number of ranks must be a multiple of {replicas * stages}"
        )
    shards = world // (replicas * stages)
    if order is None:
        return Grid(ranks=np.arange(world).reshape(replicas, stages, shards))
    groups = np.array(order).T  # replica, stage
    if groups.shape != (replicas, stages) or sorted(groups.flatten().tolist()) != list(range(replicas * stages)):
        raise ConfigurationError(
            f"the plan's grid {order} does not name every group of ranks 0..{replicas * stages - 1} exactly once"
        )
    return Grid(ranks=groups[:, :, None] * shards + np.arange(shards))
