"""What a rank needs to train a model: the law of `facility.exchange.memory` over a checkpoint's figures."""

from __future__ import annotations

from dataclasses import replace

from coordinator.memory.figures import ModelFigures
from coordinator.memory.layouts import layouts_of_plan, layouts_of_settings
from coordinator.memory.weights import dimensions_of, weights_of
from facility.exchange.errors import ConfigurationError
from facility.exchange.grid import check_batch
from facility.exchange.memory.rank import RankLayout, rank_memory
from facility.exchange.memory.records import rows_of
from facility.exchange.memory.units import memory_of_units
from facility.exchange.messages.plan import Plan
from facility.exchange.messages.settings import TrainingSettings

MOST_RANKS = 4096


def parts_of(model: ModelFigures, training: TrainingSettings, layout: RankLayout) -> dict[str, int]:
    """Memory of a rank by part, bytes."""
    dimensions = dimensions_of(model)
    units = memory_of_units(weights_of(model, training, chunked=layout.chunk_rows > 0), dimensions, training)
    return rank_memory(units, layout, dimensions, training)


def needed_bytes(
    model: ModelFigures,
    training: TrainingSettings,
    block_tokens: int,
    ranks: int,
    *,
    device: str = "cuda",
    local_ranks: int = 0,
    private: bool = False,
) -> int:
    """Memory of the rank that needs most, beside interpreter and libraries, in the layout that the settings ask for.

    `local_ranks`: of one node; 0: all. `private`: with differential privacy. Raises `ConfigurationError` where
    the ranks cannot be arranged so.
    """
    if private:
        model, training = with_records(model, training, ranks)
    layouts = layouts_of_settings(
        training,
        ranks,
        units=model.layers + 2,
        tokens=block_tokens,
        vocabulary=model.vocabulary,
        device=device,
        local_ranks=local_ranks or ranks,
    )
    layouts = [replace(layout, records=private) for layout in layouts]
    dimensions = dimensions_of(model)
    weights = weights_of(model, training, chunked=layouts[0].chunk_rows > 0)
    units = memory_of_units(weights, dimensions, training)
    return max(sum(rank_memory(units, layout, dimensions, training).values()) for layout in layouts)


def needed_by_plan(
    model: ModelFigures, training: TrainingSettings, plan: Plan, block_tokens: int, *, device: str
) -> dict[int, float]:
    """Memory of each device of a plan, by its number. Raises `ConfigurationError` for a plan of another model."""
    if plan.units != model.layers + 2:
        raise ConfigurationError(
            f"the plan covers {plan.units} units, the model has {model.layers + 2} (embedding, {model.layers} blocks, "
            "head): plan with a profile of this model"
        )
    layouts = layouts_of_plan(plan, training, tokens=block_tokens, vocabulary=model.vocabulary, device=device)
    return {number: sum(parts_of(model, training, layout).values()) for number, layout in layouts.items()}


def with_records(model: ModelFigures, training: TrainingSettings, ranks: int) -> tuple[ModelFigures, TrainingSettings]:
    """Figures and settings by which differential privacy needs memory.

    A pass has rows by their gradients' size, whatever the batch, and all its logits at once; a frozen base is held in
    float32, however it is stored. Raises `ConfigurationError` where a rank would get no record.
    """
    check_batch(training, ranks)
    trained = model.trained(training)
    rows = rows_of(training.micro_batch_sequences, trained, training.batch_sequences / ranks)
    batch = max(rows * ranks, training.batch_sequences if training.micro_batch_sequences else 0)
    used = replace(training, micro_batch_sequences=rows, batch_sequences=batch, chunked_loss="never")
    return replace(model, dtypes={}), used


def smallest_ranks(
    model: ModelFigures,
    training: TrainingSettings,
    block_tokens: int,
    memory: float,
    *,
    device: str = "cuda",
    local_ranks: int = 0,
    private: bool = False,
) -> int | None:
    """The fewest ranks of `memory` bytes that hold the training, or None when no number up to `MOST_RANKS` does.

    `local_ranks`: of one node, on which sharding may depend; of more than that whole nodes count. 0: not known.
    """
    node, ranks = local_ranks or 1, 1
    while ranks <= MOST_RANKS:
        local = min(ranks, local_ranks)
        try:
            need = needed_bytes(model, training, block_tokens, ranks, device=device, local_ranks=local, private=private)
            if need <= memory:
                return ranks
        except ConfigurationError:
            pass  # so many ranks make no whole pipelines
        ranks += 1 if ranks < 16 else ranks // 8
        if ranks > node:
            ranks = -(-ranks // node) * node
    return None
