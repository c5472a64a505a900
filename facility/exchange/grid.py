"""The rank grid of one facility: one reshaped `arange`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.layout import LayoutSettings
from facility.exchange.messages.plan import Plan
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.messages.sync import SyncSettings
from facility.exchange.text import number_of


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
    def data_ranks(self) -> int:
        """Parts that a batch is cut into: every (replica, shard) reads its own."""
        return self.replicas * self.shards

    def place(self, rank: int) -> tuple[int, int, int]:
        """(replica, stage, shard) of a rank."""
        found = np.argwhere(self.ranks == rank)
        assert len(found) == 1, f"rank {rank} is in the grid {len(found)} times"
        replica, stage, shard = found[0].tolist()
        return replica, stage, shard

    def data_rank(self, rank: int) -> int:
        """Which part of the batch a rank reads; the stages of one pipeline read the same."""
        replica, _, shard = self.place(rank)
        return replica * self.shards + shard


def sharded_grid(world: int, local_world: int, settings: LayoutSettings) -> tuple[Grid, str]:
    """The grid that the settings ask for, and how FSDP's name of it was understood."""
    node = max(1, local_world // settings.stages)
    whole = world // settings.stages or 1
    implied = {
        "FULL_SHARD": (1, "one mesh over all shards, weights freed after forward"),
        "SHARD_GRAD_OP": (1, "one mesh over all shards, weights kept until backward"),
        "HYBRID_SHARD": (
            max(1, whole // node),
            "shards within a node, a replica per node, weights freed after forward",
        ),
        "_HYBRID_SHARD_ZERO2": (max(1, whole // node), "shards within a node, a replica per node, weights kept"),
        "NO_SHARD": (whole, "every rank a replica"),
    }
    replicas, meaning = implied[settings.sharding]
    if settings.replicas:
        replicas, meaning = settings.replicas, f"{meaning}; replicas set to {settings.replicas}"
    result = rank_grid(world, replicas=replicas, stages=settings.stages)
    shape = f"{result.replicas} replicas x {result.stages} stages x {result.shards} shards"
    return result, f"{settings.sharding}: {meaning} -> {shape}"


def even_units(chunks: int, units: int) -> list[tuple[int, int]]:
    """Cut `units` units into chunks whose sizes differ by one at most."""
    if chunks > units:
        raise ConfigurationError(f"{chunks} stages for {units} units (embedding, blocks, head): use fewer stages")
    bounds = [units * k // chunks for k in range(chunks + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


def units_of_settings(layout: LayoutSettings, units: int) -> list[tuple[int, int]]:
    """[first, end) of every chunk of a model of `units` units; empty: the model is whole.

    The coordinator asks before a federation starts, the trainer before it loads a model. Raises `ConfigurationError`.
    """
    chunks = layout.stages * layout.virtual_stages
    if layout.stages == 1 and chunks > 1:
        raise ConfigurationError("layout.virtual_stages needs layout.stages of 2 or more")
    if layout.stages == 1 and layout.units:
        raise ConfigurationError(
            "layout.units names stages, but layout.stages is 1; set layout.stages, or remove units"
        )
    if layout.stages == 1:
        return []
    return checked_units(layout.units, chunks, units) if layout.units else even_units(chunks, units)


def checked_units(stage_units: list[list[int]], chunks: int, units: int) -> list[tuple[int, int]]:
    """Refuse a list of chunks that leaves a unit out or names it twice."""
    if len(stage_units) != chunks:
        raise ConfigurationError(f"layout.units has {len(stage_units)} chunks, expected {chunks}", key="layout.units")
    expected = 0
    for number, pair in enumerate(stage_units):
        if len(pair) != 2 or pair[1] <= pair[0]:
            raise ConfigurationError(f"layout.units[{number}] is {pair}, expected [first, end) with end above first")
        if pair[0] != expected:
            what = f"unit {expected} is in no chunk" if pair[0] > expected else f"unit {pair[0]} is in two chunks"
            raise ConfigurationError(f"layout.units[{number}] is {pair}: {what}; expected it to begin at {expected}")
        expected = pair[1]
    if expected != units:
        raise ConfigurationError(
            f"layout.units ends at {expected}, the model has {units} units: embedding, {units - 2} blocks, head"
        )
    return [(first, end) for first, end in stage_units]


def rank_grid(world: int, *, replicas: int = 1, stages: int = 1) -> Grid:
    """Arrange `world` ranks; shards are what replicas and stages leave over, and lie on neighbouring ranks.

    Raises `ConfigurationError` where `world` is not a multiple of `replicas` x `stages`.
    """
    if replicas < 1 or stages < 1 or world % (replicas * stages):
        raise ConfigurationError(
            f"{world} ranks cannot be arranged as {replicas} replicas x {stages} stages: "
            f"the number of ranks must be a multiple of {replicas * stages}"
        )
    shards = world // (replicas * stages)
    return Grid(ranks=np.arange(world).reshape(replicas, stages, shards))


def check_batch(settings: TrainingSettings, data_ranks: int) -> None:
    """Raise `ConfigurationError` for a batch of which some of so many data-parallel ranks would get nothing."""
    if settings.batch_sequences < data_ranks:
        raise ConfigurationError(
            f"training.batch_sequences is {settings.batch_sequences}, but {data_ranks} ranks read data: "
            "each needs at least one sequence a step; raise the batch or use fewer ranks"
        )


def micro_batches_of(settings: TrainingSettings, data_ranks: int, stages: int, *, interleaved: bool) -> tuple[int, int]:
    """(sequences of a micro-batch, micro-batches of a data-parallel rank's share of a step).

    By default a pipeline gets two micro-batches a stage; an interleaved one a multiple of its stages. Raises
    `ConfigurationError` where a rank would get no sequence.
    """
    check_batch(settings, data_ranks)
    largest = -(-settings.batch_sequences // data_ranks)
    micro = settings.micro_batch_sequences or (largest if stages == 1 else max(1, largest // (2 * stages)))
    count = -(-largest // micro)
    if stages > 1:
        count = max(count, stages)
        if interleaved:
            count = -(-count // stages) * stages
    return micro, count


def sync_of_plan(plan: Plan, settings: TrainingSettings) -> SyncSettings:
    """How the replicas of a plan stay together: as the plan says, where it does not say all-reduce."""
    if plan.sync.name == "allreduce":
        return settings.sync
    return dataclasses.replace(settings.sync, policy=plan.sync.name, **plan.sync.options)


def check_ranks_of_plan(plan: Plan, ranks: int, shards: int) -> None:
    """Raise `ConfigurationError` where so many ranks, `shards` a device, are not those that the plan needs."""
    if ranks % shards:
        raise ConfigurationError(f"{ranks} ranks are not a multiple of layout.shards {shards}")
    if max(plan.devices) >= ranks // shards:
        raise ConfigurationError(
            f"the plan uses {len(plan.devices)} devices of {number_of(shards, 'rank')} each, up to number "
            f"{max(plan.devices)}, but {ranks} ranks came; plan again"
        )


def check_work_of_plan(plan: Plan, settings: TrainingSettings) -> None:
    """Raise `ConfigurationError` where a plan's work is not that of the settings, or nothing could do it."""
    if plan.compressed_links:
        raise ConfigurationError(
            f"the plan compresses {len(plan.compressed_links)} links, but stages send their activations as they are; "
            "take `codecs` out of the problem and plan again"
        )
    shards = settings.layout.shards or 1
    counts = tuple(count for count in plan.replica_micro_batches for _ in range(shards))
    batch = sum(counts) * plan.micro_batch_samples
    if batch != settings.batch_sequences:
        raise ConfigurationError(
            f"the plan makes {batch} sequences a step ({sum(counts)} micro-batches of {plan.micro_batch_samples}), "
            f"training.batch_sequences is {settings.batch_sequences}: set it to {batch} or plan again"
        )
    once = shards == 1 and sync_of_plan(plan, settings).policy == "allreduce" and not settings.layout.offload
    if plan.stages * plan.virtual_stages == 1 and not once and len(set(counts)) > 1:
        raise ConfigurationError(
            "replicas with unequal micro-batches need stages, or the policy allreduce without shards and offload; "
            "plan again with equal ones"
        )
