"""Decide the layout of a facility: from its settings, or from a plan. Which rank holds what, and which reads what."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from facility.exchange.errors import ConfigurationError
from facility.exchange.grid import (
    Grid,
    check_ranks_of_plan,
    check_work_of_plan,
    rank_grid,
    sharded_grid,
    sync_of_plan,
    units_of_settings,
)
from facility.exchange.messages.plan import Plan
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.messages.sync import SyncSettings
from facility.exchange.schedules.registry import is_interleaved
from facility.exchange.text import number_of
from facility.training.data.loader import Shape, even_shape
from facility.training.devices import device_id
from facility.training.processes.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Everything that decides which rank holds what, in one place."""

    grid: Grid
    units: list[tuple[int, int]]
    """[first, end) of every chunk; empty: the model is whole."""
    schedule: str
    shape: Shape
    block_tokens: int
    replicas_in_mesh: bool
    """FSDP2 also averages over the replicas (HSDP); else a policy of `facility.sync` brings them together."""
    reshard: bool
    sync: SyncSettings
    agrees_once: bool = False
    """Replicas of a whole model, unsharded, exchange gradients once a step and not once a micro-batch."""
    reasons: tuple[str, ...]

    @property
    def copies(self) -> bool:
        """Whether torch averages gradients of whole copies of the model over replicas, by DDP."""
        return self.replicas_in_mesh and self.grid.replicas > 1 and self.agrees_once and not self.units

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 holds the parameters, over shards or replicas."""
        return (self.grid.shards > 1 or (self.replicas_in_mesh and self.grid.replicas > 1)) and not self.copies

    def to_json(self) -> dict[str, Any]:
        """What the report says of the layout."""
        return {
            "replicas": self.grid.replicas,
            "stages": self.grid.stages,
            "shards": self.grid.shards,
            "units": [list(pair) for pair in self.units],
            "schedule": self.schedule if self.units else "",
            "micro_batches": list(self.shape.micro_batches),
            "micro_batch_sequences": self.shape.micro_batch_sequences,
            "replicas_by": "fsdp2" if self.replicas_in_mesh else self.sync.policy,
            "reasons": list(self.reasons),
        }


def remapped_rank(ranks: Ranks, plan: Plan, shards: int) -> Ranks | None:
    """This process's place among the ranks that the plan uses; None where the plan leaves it idle."""
    check_ranks_of_plan(plan, ranks.world, shards)
    # torch sorts the ranks of a group, so ranks are renumbered in the plan's order: by replica, then by stage.
    used = [device for replica in zip(*plan.grid, strict=True) for device in replica]
    group, within = divmod(ranks.rank, shards)
    if group not in used:
        return None
    host = 0 if 0 in used else min(used)
    return dataclasses.replace(
        ranks, rank=used.index(group) * shards + within, world=len(used) * shards, hosts=ranks.rank == host * shards
    )


def check_devices(plan: Plan, number: int, ranks: Ranks) -> None:
    """Refuse a plan made for other devices: `number` is this rank's in the plan. Raises `ConfigurationError`."""
    if not plan.device_ids:
        return
    planned = plan.device_ids[number] if number < len(plan.device_ids) else "unknown"
    found = device_id(ranks.device, ranks.local_rank)
    if planned != found:
        known = f"; it knows {found} as device {plan.device_ids.index(found)}" if found in plan.device_ids else ""
        raise ConfigurationError(
            f"device {number} of the plan is {planned}, but rank {number} came on {found}{known}: the allocation is "
            "not the one that was measured; measure and plan again, or make a plan for any devices of this kind "
            "(coordinator.plan --any-devices)"
        )


def layout_of_plan(plan: Plan, ranks: Ranks, settings: TrainingSettings, *, blocks: int, block_tokens: int) -> Layout:
    """The layout that a plan asks for. Raises `ConfigurationError` where it does not fit ranks, model or batch."""
    shards = settings.layout.shards or 1
    devices = sorted({device for row in plan.grid for device in row})
    plan.validate(max(devices[-1] + 1, ranks.world // shards), blocks)
    if ranks.world != len(devices) * shards:
        raise ConfigurationError(
            f"the plan uses {len(devices)} devices of {number_of(shards, 'rank')} each, but {ranks.world} ranks came; "
            "plan again"
        )
    arrangement = rank_grid(ranks.world, replicas=plan.replicas, stages=plan.stages)
    counts = tuple(count for count in plan.replica_micro_batches for _ in range(shards))
    check_work_of_plan(plan, settings)
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count * plan.micro_batch_samples)
    pipelined = plan.stages * plan.virtual_stages > 1
    sync = sync_of_plan(plan, settings)
    once = shards == 1 and sync.policy == "allreduce" and not settings.layout.offload
    return Layout(
        grid=arrangement,
        units=[(a, b) for a, b in plan.stage_units] if pipelined else [],
        schedule=plan.schedule,
        shape=Shape(
            bounds=tuple(bounds), micro_batch_sequences=plan.micro_batch_samples, micro_batches=counts, fixed=pipelined
        ),
        block_tokens=block_tokens,
        replicas_in_mesh=sync.policy == "allreduce",
        reshard=settings.layout.sharding in ("FULL_SHARD", "HYBRID_SHARD"),
        sync=sync,
        agrees_once=once,
        reasons=(f"as the plan by {plan.method or 'hand'} says", *plan.reasons),
    )


def layout_of_settings(ranks: Ranks, settings: TrainingSettings, *, blocks: int, block_tokens: int) -> Layout:
    """The layout that the settings ask for. Raises `ConfigurationError` where it does not fit ranks, model or batch."""
    layout = settings.layout
    arrangement, meaning = sharded_grid(ranks.world, ranks.local_world, layout)
    units = units_of_settings(layout, blocks + 2)
    if units:
        meaning += f"; units {units} under {layout.schedule}"
    shape = even_shape(
        settings, arrangement.data_ranks, stages=layout.stages, interleaved=is_interleaved(layout.schedule)
    )
    return Layout(
        grid=arrangement,
        units=units,
        schedule=layout.schedule,
        shape=shape,
        block_tokens=block_tokens,
        replicas_in_mesh=settings.sync.policy == "allreduce",
        reshard=layout.sharding in ("FULL_SHARD", "HYBRID_SHARD"),
        sync=settings.sync,
        agrees_once=arrangement.shards == 1 and not layout.offload,
        reasons=(meaning,),
    )
