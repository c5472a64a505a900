"""What a rank will need, predicted before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from facility.exchange.checkpoints.blocks import find_blocks
from facility.exchange.errors import CrossFedError, InputError, TransientError
from facility.exchange.memory.rank import RankLayout, rank_memory
from facility.exchange.memory.replicas import exchanged_vectors, exchanges_state
from facility.exchange.memory.units import EMBEDDING, Dimensions, Weight, memory_of_units
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.sizes import format_bytes
from facility.training.devices import free_bytes
from facility.training.layer_configs import largest
from facility.training.parallel.arrange import Layout
from facility.training.parallel.structure import ModelStructure
from facility.training.processes.ranks import Ranks
from facility.training.quantized_base import quantized_layers

NEEDS_LESS = (
    "use more ranks, a smaller training.micro_batch_sequences, layout.activation_checkpointing, LoRA, or LoRA on a "
    "base in 4 bits (training.lora.quantize_base)"
)
CONTEXT_BYTES = 10**9
"""A process's own on a GPU, beside what torch reserves: kernels and libraries."""


def available_bytes(ranks: Ranks, settings: TrainingSettings) -> int:
    """Memory for this rank: the limit set, or what is free as `facility.measure` reports to the planner."""
    if settings.limits.memory_bytes:
        return settings.limits.memory_bytes
    return int(free_bytes(ranks.device, ranks.local_world))


def predicted_bytes(
    model: nn.Module,
    structure: ModelStructure | None,
    rank: RankLayout,
    settings: TrainingSettings,
    config: Any,
) -> dict[str, int]:
    """By part, in bytes, as `facility.exchange.memory` works it out.

    `model`: the skeleton that the ranks cut up; `rank`: what one of them holds of it, by `rank_layout`.
    """
    dimensions = dimensions_of(model, config)
    weights = weights_of(model, structure, settings, chunked=rank.chunk_rows > 0)
    return rank_memory(memory_of_units(weights, dimensions, settings), rank, dimensions, settings)


def dimensions_of(model: nn.Module, config: Any) -> Dimensions:
    """Dimensions of a model as the memory prediction takes them, from its modules and configuration."""
    inner, hidden = largest(config, "intermediate_size"), getattr(config, "hidden_size", 0)
    gated = any(".gate_proj." in name for name, _ in model.named_parameters())
    return Dimensions(
        hidden=hidden,
        blocks=getattr(config, "num_hidden_layers", 0) or len(find_blocks(model)[1]),
        vocabulary=getattr(config, "vocab_size", 0),
        gated=inner / hidden if gated and isinstance(inner, int) and hidden else 0.0,
    )


def weights_of(
    model: nn.Module, structure: ModelStructure | None, settings: TrainingSettings, *, chunked: bool
) -> list[Weight]:
    """Every parameter of the skeleton, in the unit that holds it."""
    in_bits = {f"{name}.weight" for name in quantized_layers(model, settings)}
    cast = cast_weights(model, settings, chunked=chunked) - in_bits
    unit_of = structure.unit_of if structure is not None else unit_of_whole(model)
    return [
        Weight(
            name=name,
            shape=tuple(parameter.shape),
            unit=unit_of(name),
            trained=parameter.requires_grad,
            held_bytes=settings.lora.base_bytes if name in in_bits else parameter.element_size(),
            copied=name in cast,
        )
        for name, parameter in model.named_parameters()
    ]


def unit_of_whole(model: nn.Module) -> Callable[[str], int]:
    """Unit of a parameter of a model that no stage cuts: of what is in no block by its name, embedding or head."""
    path, blocks = find_blocks(model)
    head = len(blocks) + 1

    def unit(name: str) -> int:
        if name.startswith(f"{path}."):
            return int(name[len(path) + 1 :].split(".", 1)[0]) + 1
        return 0 if EMBEDDING.search(name) else head

    return unit


def rank_layout(layout: Layout, ranks: Ranks, chunk_rows: int, settings: TrainingSettings) -> RankLayout:
    """This rank's place in the layout, as the law of memory takes it."""
    grid = layout.grid
    _, row, _ = grid.place(ranks.rank)
    apart = grid.replicas > 1 and not layout.replicas_in_mesh
    return RankLayout(
        spans=tuple(pair for index, pair in enumerate(layout.units) if index % grid.stages == row),
        stage=row,
        stages=grid.stages,
        schedule=layout.schedule,
        micro_batches=max(layout.shape.micro_batches),
        sequences=layout.shape.micro_batch_sequences,
        tokens=layout.block_tokens,
        shards=grid.shards,
        sharded=layout.sharded,
        offloaded=layout.sharded and settings.layout.offload and ranks.device.type == "cuda",
        reshard=layout.reshard and not layout.units,
        exchanged=exchanged_vectors(layout.sync, ranks.device.type) if apart else 0.0,
        exchanges_state=apart and exchanges_state(layout.sync),
        chunk_rows=chunk_rows,
    )


def cast_weights(model: nn.Module, settings: TrainingSettings, *, chunked: bool) -> set[str]:
    """Weights of which a copy in half precision lives from forward to backward, where autocast makes it.

    Those of linear layers, whose backward needs them; a layer that is computed in chunks has its own way. A frozen
    layer that runs again in backward is cast again then, while autocast remembers the copies of trained ones all the
    same. FSDP casts by itself, block by block.
    """
    if settings.compute_dtype == "float32":
        return set()
    again = settings.layout.activation_checkpointing != "none"
    head = model.get_output_embeddings() if chunked else None  # type: ignore[operator]
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and module.weight.dtype == torch.float32
        and (module.weight.requires_grad or not again)
    }


def check_memory(parts: dict[str, int], ranks: Ranks, settings: TrainingSettings) -> None:
    """Raise `InputError` with the numbers where the prediction exceeds what there is."""
    total, there = sum(parts.values()), available_bytes(ranks, settings)
    if total > there:
        listed = ", ".join(f"{name} {format_bytes(value)}" for name, value in parts.items())
        raise InputError(
            f"rank {ranks.rank} will need about {format_bytes(total)} of memory ({listed}), it has "
            f"{format_bytes(there)}: {NEEDS_LESS}"
        )


def is_out_of_host_memory(error: BaseException) -> bool:
    """Whether the host's memory ended, as torch says it (a plain RuntimeError) or numpy and Python."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def out_of_host_memory(held: int, limit: float) -> InputError:
    """What to say where the host gives this rank no more than the bytes it `held`; `limit`: of its addresses."""
    limited = "" if math.isinf(limit) else f", and its addresses are limited to {format_bytes(limit)} (ulimit -v)"
    return InputError(
        f"out of memory: this rank held {format_bytes(held)}{limited}: ask the scheduler for more, or {NEEDS_LESS}"
    )


def out_of_memory(name: str, total: int, free: int, reserved: int) -> CrossFedError:
    """What to say where a GPU has no memory left: `total` and `free` bytes of it, `reserved` by this process.

    `TransientError` where other processes hold more than their contexts need: they may end.
    """
    others = total - free - reserved - CONTEXT_BYTES
    text = f"out of memory on {name}: of {format_bytes(total)} this rank held {format_bytes(reserved)}"
    if others > CONTEXT_BYTES:
        return TransientError(
            f"{text} and other processes {format_bytes(others)}: expected a GPU for this rank alone; ask the scheduler "
            f"for GPUs of one's own, or {NEEDS_LESS}"
        )
    return InputError(f"{text}: {NEEDS_LESS}")
