"""What each rank of a facility's layout holds, by its settings or by a plan."""

from __future__ import annotations

from facility.exchange.grid import micro_batches_of, sharded_grid, sync_of_plan, units_of_settings
from facility.exchange.memory.chunks import wanted_rows
from facility.exchange.memory.rank import RankLayout
from facility.exchange.memory.replicas import exchanged_vectors, exchanges_state
from facility.exchange.messages.plan import Plan
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.schedules.registry import is_interleaved


def layouts_of_settings(
    training: TrainingSettings, ranks: int, *, units: int, tokens: int, vocabulary: int, device: str, local_ranks: int
) -> list[RankLayout]:
    """One for each stage. Raises `ConfigurationError` where the ranks cannot be arranged so.

    `device`: cpu or cuda; `local_ranks`: of one node.
    """
    layout = training.layout
    grid, _ = sharded_grid(ranks, local_ranks, layout)
    spans = units_of_settings(layout, units)
    sequences, count = micro_batches_of(
        training, grid.data_ranks, layout.stages, interleaved=is_interleaved(layout.schedule)
    )
    replicated = grid.replicas > 1 and training.sync.policy == "allreduce"
    copies = replicated and grid.shards == 1 and not layout.offload and not spans
    sharded = (grid.shards > 1 or replicated) and not copies
    apart = grid.replicas > 1 and not replicated
    return [
        RankLayout(
            spans=tuple(spans[stage :: layout.stages]),
            stage=stage,
            stages=layout.stages,
            schedule=layout.schedule,
            micro_batches=count,
            sequences=sequences,
            tokens=tokens,
            shards=grid.shards,
            sharded=sharded,
            offloaded=sharded and layout.offload and device == "cuda",
            reshard=layout.sharding in ("FULL_SHARD", "HYBRID_SHARD") and not spans,
            exchanged=exchanged_vectors(training.sync, device) if apart else 0.0,
            exchanges_state=apart and exchanges_state(training.sync),
            chunk_rows=rows_of(training, sequences * tokens, vocabulary, device),
        )
        for stage in range(layout.stages)
    ]


def layouts_of_plan(
    plan: Plan, training: TrainingSettings, *, tokens: int, vocabulary: int, device: str
) -> dict[int, RankLayout]:
    """Layout of the rank on each device of a plan, by the device's number."""
    shards = training.layout.shards or 1
    pipelined = plan.stages * plan.virtual_stages > 1
    spans = [(first, end) for first, end in plan.stage_units] if pipelined else []
    replicated = plan.replicas > 1 and plan.sync.name == "allreduce" and training.sync.policy == "allreduce"
    copies = replicated and shards == 1 and not training.layout.offload and not pipelined
    sharded = (shards > 1 or replicated) and not copies
    sync, apart = sync_of_plan(plan, training), plan.replicas > 1 and not replicated
    return {
        number: RankLayout(
            spans=tuple(spans[stage :: plan.stages]),
            stage=stage,
            stages=plan.stages,
            schedule=plan.schedule,
            micro_batches=max(plan.replica_micro_batches),
            sequences=plan.micro_batch_samples,
            tokens=tokens,
            shards=shards,
            sharded=sharded,
            offloaded=sharded and training.layout.offload and device == "cuda",
            reshard=training.layout.sharding in ("FULL_SHARD", "HYBRID_SHARD") and not pipelined,
            exchanged=exchanged_vectors(sync, device) if apart else 0.0,
            exchanges_state=apart and exchanges_state(sync),
            chunk_rows=rows_of(training, plan.micro_batch_samples * tokens, vocabulary, device),
        )
        for stage, row in enumerate(plan.grid)
        for number in row
    }


def rows_of(training: TrainingSettings, positions: int, vocabulary: int, device: str) -> int:
    """Positions of a chunk of the loss; 0: all logits at once, or the vocabulary is not known."""
    return wanted_rows(training, positions, vocabulary, device) if vocabulary else 0
