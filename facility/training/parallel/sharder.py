"""How the modules of one rank are sharded, allocated and computed, from a layout and this process's ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from facility.exchange.malloc import return_what_is_freed
from facility.exchange.messages.settings import TrainingSettings
from facility.training.monitor.clock import Clock
from facility.training.parallel.arrange import Layout
from facility.training.parallel.collectives import time_collectives
from facility.training.parallel.compute import Precision
from facility.training.parallel.shard import shard_model
from facility.training.processes.groups import mesh_of
from facility.training.processes.ranks import Ranks
from facility.training.shards import initialise_parameters


class Sharder:
    """Shards and allocates the modules of one rank as the layout says."""

    def __init__(self, layout: Layout, ranks: Ranks, settings: TrainingSettings, clock: Clock) -> None:
        self.layout, self.ranks, self.settings, self.clock = layout, ranks, settings, clock
        self.dtype: torch.dtype = getattr(torch, settings.compute_dtype)
        grid = layout.grid
        self.mesh: DeviceMesh | None = None
        """Every rank by (replica, stage, shard); None for a single rank."""
        if ranks.world > 1:
            names = ("replica", "stage", "shard")
            self.mesh = mesh_of(ranks.device, grid.ranks, names, ranks.rank, timeout_seconds=settings.stall_seconds)
        self.in_mesh = layout.replicas_in_mesh and grid.replicas > 1
        """True if torch averages gradients over replicas, by FSDP2 or DDP."""
        if layout.sharded and ranks.device.type == "cpu":
            return_what_is_freed()
        self.precision = Precision(ranks.device, self.dtype, casts_itself=layout.sharded)

    def allocate(self, module: nn.Module, blocks: list[nn.Module], output: torch.dtype | None) -> None:
        """Apply FSDP2 where the layout asks for it, then give the module's parameters memory."""
        if self.layout.sharded:
            assert self.mesh is not None
            chosen = self.mesh["replica", "shard"] if self.in_mesh else self.mesh["shard"]
            shard_model(
                module,
                blocks,
                chosen,
                compute_dtype=self.dtype,
                reshard=self.layout.reshard and not self.layout.units,
                offload=self.settings.layout.offload,
                root_output=output,
            )
            time_collectives(module, self.clock, replicas=self.in_mesh)
        initialise_parameters(module, self.ranks.device)
