"""What a rank will need, predicted before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from facility.exchange.checkpoints.adapters import A, B
from facility.exchange.errors import CrossFedError, InputError, TryAgain
from facility.exchange.messages.optimizers import OPTIMIZERS
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.schedules.registry import SCHEDULES
from facility.training.devices import free_bytes
from facility.training.parallel.arrange import Layout
from facility.training.parallel.split import ModelStructure
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
    layout: Layout,
    ranks: Ranks,
    settings: TrainingSettings,
    config: Any,
    chunk_rows: int = 0,
) -> dict[str, int]:
    """By part, in bytes.

    Weights (4 a weight, 2 where it is held so; of a quantised base `base_bytes`), gradients (4) and optimizer state
    (AdamW: 8) of the rows held; activations of the micro-batches in flight (`kept_values`); logits and their gradient
    in float32, of `chunk_rows` positions where they are computed in chunks (then the weight's gradient exists a second
    time); one quantised layer in float32, as it is loaded and as it is multiplied; in half precision the weights that
    autograd keeps so (`cast_weights`).
    """
    grid = layout.grid
    _, row, _ = grid.place(ranks.rank)
    mine = [pair for index, pair in enumerate(layout.units) if index % grid.stages == row]
    in_bits = {f"{name}.weight" for name in quantized_layers(model, settings)}
    cast = cast_weights(model, settings, chunked=chunk_rows > 0) - in_bits if grid.shards == 1 else set()
    trained = largest = copied = 0
    held = adapted = 0.0
    for name, parameter in model.named_parameters():
        unit = structure.unit_of(name) if structure is not None else None
        if unit is None or any(first <= unit < end for first, end in mine):
            held += parameter.numel() * (settings.lora.base_bytes if name in in_bits else parameter.element_size())
            largest = max(largest, parameter.numel()) if name in in_bits else largest
            copied += 2 * parameter.numel() if name in cast else 0
            trained += parameter.numel() if parameter.requires_grad else 0
            adapted += kept_beside(name, parameter.shape)
    width = 4 if settings.compute_dtype == "float32" else 2
    hidden, count = getattr(config, "hidden_size", 0), getattr(config, "num_hidden_layers", 0)
    blocks = sum(end - first for first, end in mine) if mine else count
    tokens = layout.shape.micro_batch_sequences * layout.block_tokens
    in_flight = (
        1
        if not mine
        else grid.stages
        if not SCHEDULES.get(layout.schedule).holds_all
        else max(layout.shape.micro_batches)
    )
    whole = width * (hidden * blocks * kept_values(model, config, adapters=bool(adapted)) + adapted)
    per_token = {"none": whole, "selective": hidden * blocks * 10 * width, "full": hidden * blocks * width}[
        settings.layout.activation_checkpointing
    ]
    vocabulary, once_more = getattr(config, "vocab_size", 0), 4 * hidden if chunk_rows else 0
    has_head = not mine or mine[-1][1] == count + 2
    return {
        "weights": int(held) // grid.shards,
        "gradients": 4 * trained // grid.shards,
        "optimizer": int(OPTIMIZERS.get(settings.optimizer).state_bytes * trained) // grid.shards,
        "activations": round(tokens * per_token * in_flight),
        "logits": vocabulary * ((chunk_rows or tokens) * (8 + width) + once_more) if has_head else 0,
        **({"weights in half precision": copied} if copied else {}),
        **({"one layer dequantised": 4 * largest} if largest else {}),
    }


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


def kept_values(model: nn.Module, config: Any, *, adapters: bool) -> float:
    """Values that autograd keeps of a block for the backward pass, a token and hidden unit.

    17 where no more is known of the block (Korthikanti et al. 2022, arXiv 2205.05198, eq. 2 without the attention
    matrix). With a gated feed-forward network of r hidden widths, as Llama's: 11 of norms, residuals and attention, and
    the two products, their gate and the network's inner values, 4 r. Below adapters, frozen layers and norms keep no
    input of their own: 7 + 3 r, and `kept_beside` of each adapter.
    """
    inner, hidden = getattr(config, "intermediate_size", None), getattr(config, "hidden_size", 0)
    gated = any(".gate_proj." in name for name, _ in model.named_parameters())
    if not (gated and isinstance(inner, int) and hidden):
        return 17.0
    ratio = inner / hidden
    return 7 + 3 * ratio if adapters else 11 + 4 * ratio


def kept_beside(name: str, shape: Sequence[int]) -> float:
    """Values a token that an adapter keeps: its layer's output once and a half, as measured, and half of its input,
    which several adapters share."""
    if len(shape) != 2:
        return 0.0
    return 1.5 * shape[0] if B in name else 0.5 * shape[1] if A in name else 0.0


def check(parts: dict[str, int], ranks: Ranks, settings: TrainingSettings) -> None:
    """Raise `InputError` with the numbers where the prediction exceeds what there is."""
    total, there = sum(parts.values()), available_bytes(ranks, settings)
    if total > there:
        listed = ", ".join(f"{name} {value / 1e9:.3g} GB" for name, value in parts.items())
        raise InputError(
            f"rank {ranks.rank} will need about {total / 1e9:.3g} GB of memory ({listed}), it has "
            f"{there / 1e9:.3g} GB: {NEEDS_LESS}"
        )


def out_of_memory(name: str, total: int, free: int, reserved: int) -> CrossFedError:
    """What to say where a GPU has no memory left: `total` and `free` bytes of it, `reserved` by this process.

    `TryAgain` where other processes hold more than their contexts need: they may end.
    """
    others = total - free - reserved - CONTEXT_BYTES
    told = f"out of memory on {name}: of {total / 1e9:.3g} GB this rank held {reserved / 1e9:.3g}"
    if others > CONTEXT_BYTES:
        return TryAgain(
            f"{told} and other processes {others / 1e9:.3g}: expected a GPU for this rank alone; ask the scheduler for "
            f"GPUs of one's own, or {NEEDS_LESS}"
        )
    return InputError(f"{told}: {NEEDS_LESS}")
