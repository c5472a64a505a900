"""Memory of each unit of a model: 0 the embedding, 1..L the blocks, L+1 the head."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from facility.exchange.checkpoints.adapters import A, B
from facility.exchange.memory.optimizer_state import state_bytes
from facility.exchange.messages.settings import TrainingSettings


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Dimensions of a model that decide its activations: hidden width, blocks, vocabulary."""

    hidden: int
    blocks: int
    vocabulary: int
    gated: float = 0.0
    """Width of a gated feed-forward network over the hidden one; 0: the network is another, or not known."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter, as a rank that holds all of it would hold it."""

    name: str
    shape: tuple[int, ...]
    unit: int
    trained: bool
    held_bytes: float = 4.0
    """A weight: 4, 2 where it is held in half precision, `base_bytes` of a quantised base."""
    copied: bool = False
    """Autocast makes a copy in half precision that lives from forward to backward."""

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def in_bits(self) -> bool:
        """Whether it is quantised."""
        return self.held_bytes < 2


@dataclass(frozen=True, kw_only=True)
class UnitMemory:
    """Bytes of one unit on a rank that holds all of it."""

    weights: float
    trained: int
    """Number of weights that are trained."""
    state: float
    """Of the optimizer, of those."""
    copies: int
    """In half precision, of what autocast casts."""
    gathered: float
    """What FSDP2 gathers of it to compute with it."""
    largest_in_bits: int
    """Weights of its largest quantised layer."""
    kept: float
    """For the backward pass, a token."""
    cast: float = 0.0
    """More than that, a token, where autocast casts (FSDP2 casts by itself)."""
    again: float = 0.0
    """While it is computed again in backward, a token."""
    largest_trained: int = 0
    """Of one of its tensors that is trained: number of weights."""
    projects: bool = True
    """One of its weights is a matrix: a head without one uses the embedding's."""


EMBEDDING = re.compile(r"(^|\.)(embed(?!_out)\w*|wte|wpe|word_embeddings|tok_embeddings)(\.|$)")
"""In the names of what stands before the first block."""
CAST_BYTES = 12
"""A token and hidden unit, of a block like Llama's under autocast: two residuals and two normalised inputs in float32,
and an input in half precision for each of five layers, in place of one value of each."""


def width_of(training: TrainingSettings) -> int:
    """Bytes of a value that is computed with."""
    return 4 if training.compute_dtype == "float32" else 2


def memory_of_units(
    weights: Iterable[Weight], dimensions: Dimensions, training: TrainingSettings
) -> tuple[UnitMemory, ...]:
    """Memory of each unit, in order: embedding, blocks, head."""
    by_unit: dict[int, list[Weight]] = {unit: [] for unit in range(dimensions.blocks + 2)}
    for weight in weights:
        by_unit[min(weight.unit, dimensions.blocks + 1)].append(weight)
    adapted = any(kept_beside(one.name, one.shape) for held in by_unit.values() for one in held)
    return tuple(
        _memory_of_unit(held, dimensions, training, block=0 < unit <= dimensions.blocks, adapted=adapted)
        for unit, held in by_unit.items()
    )


def _memory_of_unit(
    held: Sequence[Weight], dimensions: Dimensions, training: TrainingSettings, *, block: bool, adapted: bool
) -> UnitMemory:
    width, casts = width_of(training), training.compute_dtype != "float32"
    beside = sum(kept_beside(one.name, one.shape) for one in held)
    compiled = training.layout.compile
    values = dimensions.hidden * kept_values(dimensions.gated, adapters=adapted, compiled=compiled) if block else 0.0
    kept, again = width * (values + beside), 0.0
    # Of whole models whose blocks are neither compiled nor computed again; what is sent from block to block else.
    cast = CAST_BYTES * dimensions.hidden * (block and casts and dimensions.gated > 0 and not adapted and not compiled)
    checkpointing = training.layout.activation_checkpointing
    if checkpointing != "none":
        whole = kept + cast
        kept, cast = width * dimensions.hidden * block, (4 - width) * dimensions.hidden * block
        if checkpointing == "selective":
            kept += width * (products(dimensions.gated) * dimensions.hidden * block + products_beside(held))
        again = max(0.0, whole - kept) if checkpointing == "selective" else whole
    return UnitMemory(
        weights=sum(one.count * one.held_bytes for one in held),
        trained=sum(one.count for one in held if one.trained),
        state=state_bytes(training, [(one.name, one.shape) for one in held if one.trained]),
        copies=sum(2 * one.count for one in held if one.copied),
        gathered=sum(one.count * (one.held_bytes if one.in_bits else width) for one in held),
        largest_in_bits=max((one.count for one in held if one.in_bits), default=0),
        kept=kept,
        cast=cast,
        again=again,
        largest_trained=max((one.count for one in held if one.trained), default=0),
        projects=any(len(one.shape) == 2 for one in held),
    )


def kept_values(gated: float, *, adapters: bool, compiled: bool) -> float:
    """Values that autograd keeps of a block for the backward pass, a token and hidden unit.

    17 where no more is known of the block (Korthikanti et al. 2022, arXiv 2205.05198, eq. 2 without the attention
    matrix). With a gated feed-forward network of r hidden widths, as Llama's: 11 of norms, residuals and attention, and
    the two products, their gate and the network's inner values, 4 r. A compiled block computes norms, gate and casts
    again: its two residuals in float32, normalised inputs, attention and two products remain, 10 + 2 r values of half
    precision. Below adapters, frozen layers and norms keep no input of their own: 7 + 3 r, and `kept_beside` of each
    adapter.
    """
    if not gated:
        return 17.0
    if adapters:
        return 7 + 3 * gated
    return 10 + 2 * gated if compiled else 11 + 4 * gated


def products(gated: float) -> float:
    """Results of matrix products and attention in a block, a token and hidden unit: of four layers of attention, of
    attention itself and of the network's last layer; and of its first, 4 hidden widths, or of two of r if it is gated.
    """
    return 6 + (2 * gated or 4)


def products_beside(held: Sequence[Weight]) -> int:
    """Results of the matrix products of adapters, a token."""
    return sum(one.shape[0] for one in held if len(one.shape) == 2 and (A in one.name or B in one.name))


def kept_beside(name: str, shape: Sequence[int]) -> float:
    """Values a token that an adapter keeps: its layer's output once and a half, as measured, and half of its input,
    which several adapters share."""
    if len(shape) != 2:
        return 0.0
    return 1.5 * shape[0] if B in name else 0.5 * shape[1] if A in name else 0.0
