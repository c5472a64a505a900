"""Memory of one rank: the units that it holds, the passes that wait for their backward, and what FSDP2 gathers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from facility.exchange.memory.records import record_bytes
from facility.exchange.memory.units import Dimensions, UnitMemory, width_of
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.schedules.ops import Op, peak_bytes
from facility.exchange.schedules.registry import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """What one rank holds and computes."""

    spans: tuple[tuple[int, int], ...] = ()
    """[first, end) over units of every chunk that it holds, in order; empty: the whole model."""
    stage: int = 0
    stages: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 1
    """Micro-batches of one optimizer step."""
    sequences: int
    """Sequences of one micro-batch."""
    tokens: int
    """Tokens of one sequence."""
    shards: int = 1
    """Ranks that share what it holds."""
    sharded: bool = False
    """Whether FSDP2 holds the parameters, over shards or replicas."""
    reshard: bool = True
    """FSDP2 frees a block's weights between forward and backward."""
    offloaded: bool = False
    """FSDP2 keeps what it shards, its gradients and the optimizer's state in the host's memory, not in a GPU's."""
    exchanged: float = 0.0
    """Float32 vectors over its trained weights that it holds at most to exchange with other replicas (`replicas`)."""
    exchanges_state: bool = False
    """The optimizer's state is exchanged beside the weights."""
    records: bool = False
    """Every sequence has a gradient of its own, as differential privacy needs."""
    chunk_rows: int = 0
    """Positions of which logits are computed at once; 0: all of a micro-batch."""


def rank_memory(
    units: Sequence[UnitMemory], layout: RankLayout, dimensions: Dimensions, training: TrainingSettings
) -> dict[str, int]:
    """By part, in bytes; the sum is what the rank needs beside interpreter and libraries.

    Weights, gradients (4 a trained weight) and optimizer state of the rows held; activations of the micro-batches that
    wait for their backward, and of the largest block that is computed again; logits and their gradient in float32, of
    `chunk_rows` positions where they are computed in chunks (then the weight's gradient exists a second time); in half
    precision the copies that autocast makes; under FSDP2 the weights that are gathered; the correction of drift and the
    proximal term (4 a trained weight each); what replicas with weights of their own exchange; one quantised layer in
    float32, as it is loaded and as it is multiplied; of several micro-batches the largest tensor's gradient of one,
    before it is added to the sum. What is offloaded counts while it is gathered, and the gradients of one block while
    they are reduced.
    """
    chunks = [range(first, end) for first, end in layout.spans] or [range(len(units))]
    held = [units[unit] for chunk in chunks for unit in chunk]
    trained, tokens = sum(unit.trained for unit in held), layout.sequences * layout.tokens
    kept = [
        tokens * sum(units[unit].kept + (0 if layout.sharded else units[unit].cast) for unit in chunk)
        for chunk in chunks
    ]
    at_once, once = logits_bytes(layout.chunk_rows, dimensions, training)
    has_head = chunks[-1].stop == len(units)
    with_head = [0.0] * (len(chunks) - 1) + [tokens * at_once * has_head]
    logits = in_flight(layout, with_head)
    activations = in_flight(layout, [a + b for a, b in zip(kept, with_head, strict=True)]) - logits
    activations += tokens * max((unit.again for unit in held), default=0.0)
    here, ends = not layout.offloaded, (0, len(units) - 1)
    blocks = [units[unit] for chunk in chunks for unit in chunk if unit not in ends]
    parts = {
        "weights": here * int(sum(unit.weights for unit in held)) // layout.shards,
        "gradients": 4 * trained // layout.shards if here else reduced_bytes(blocks, layout.shards, training),
        "optimizer": here * int(sum(unit.state for unit in held)) // layout.shards,
        "activations": round(activations),
        "logits": round(logits + once * has_head),
    }
    more = {
        "weights in half precision": 0 if layout.sharded else sum(unit.copies for unit in held),
        "gathered weights": gathered_bytes(units, chunks, layout, beside=parts["activations"] + parts["logits"]),
        "drift correction": here * 4 * trained // layout.shards if training.drift_correction else 0,
        "proximal term": here * 4 * trained // layout.shards if training.proximal else 0,
        "exchange between replicas": exchanged_bytes(held, layout),
        "one layer dequantised": 4 * max((unit.largest_in_bits for unit in held), default=0),
        "gradients of records": gradients_of_records(units, layout, dimensions, training, parts["logits"]),
        "one gradient before it is added": 0
        if layout.sharded or layout.micro_batches == 1 or layout.records
        else 4 * max((unit.largest_trained for unit in held), default=0),
    }
    return parts | {name: value for name, value in more.items() if value}


def gradients_of_records(
    units: Sequence[UnitMemory], layout: RankLayout, dimensions: Dimensions, training: TrainingSettings, logits: float
) -> int:
    """What the gradients of single records need, beside the activations as they are without such gradients.

    Of each block autograd keeps one hidden value a token more: what attention gave is put together from the rows.
    """
    if not layout.records:
        return 0
    tokens, ends = layout.sequences * layout.tokens, (0, len(units) - 1)
    copied = width_of(training) * dimensions.hidden
    more = [0 if number in ends else tokens * copied for number in range(len(units))]
    kept = [tokens * (unit.kept + unit.cast) + copy for unit, copy in zip(units, more, strict=True)]
    last = 4.0 * tokens * dimensions.vocabulary
    return sum(more) + record_bytes(units, layout.sequences, kept, logits=logits, last=last)


def exchanged_bytes(held: Sequence[UnitMemory], layout: RankLayout) -> int:
    """Of the vectors that replicas exchange; freed gradients and activations seldom lie where a vector fits."""
    vectors = layout.exchanged * sum(4 * unit.trained for unit in held)
    return int(vectors + layout.exchanges_state * sum(unit.state for unit in held)) // layout.shards


def reduced_bytes(blocks: Sequence[UnitMemory], shards: int, training: TrainingSettings) -> int:
    """Bytes of the largest block's gradients while reduced: as computed, in float32, and the shard of their sum."""
    largest = max((block.trained for block in blocks), default=0)
    return largest * (width_of(training) + 4) + 4 * largest // shards


def logits_bytes(chunk_rows: int, dimensions: Dimensions, training: TrainingSettings) -> tuple[float, float]:
    """Bytes of logits and their gradients: (a token of every micro-batch that waits, once for all)."""
    a_row = dimensions.vocabulary * (8 + width_of(training))
    return (0.0, chunk_rows * a_row + 4.0 * dimensions.vocabulary * dimensions.hidden) if chunk_rows else (a_row, 0.0)


def in_flight(layout: RankLayout, by_chunk: Sequence[float]) -> float:
    """The most that wait at once of these bytes of every chunk and micro-batch."""
    if not layout.spans:
        return by_chunk[0]
    # Chunk k of the model runs on rank k % stages.
    place = {layout.stage + number * layout.stages: value for number, value in enumerate(by_chunk)}
    order: Callable[[int, int, int], tuple[tuple[Op, ...], ...]] = SCHEDULES.load(layout.schedule)
    return peak_bytes(order(layout.stages, len(layout.spans), layout.micro_batches)[layout.stage], place)


def gathered_bytes(units: Sequence[UnitMemory], chunks: Sequence[range], layout: RankLayout, *, beside: float) -> int:
    """What FSDP2 needs beyond the rows held.

    Embedding and head stay gathered from forward to the end of backward; of the blocks the one that is computed and the
    next, whose gathering has begun, or all where they are not freed. At the end of backward activations and logits
    (`beside`) are gone, and the gradients of embedding and head are there whole, twice while they are reduced.
    """
    if not layout.sharded:
        return 0
    ends = (0, len(units) - 1)
    held = [unit for chunk in chunks for unit in chunk]
    root = [units[unit] for unit in held if unit in ends]
    blocks = [units[unit].gathered for unit in held if unit not in ends]
    computed = sum(sorted(blocks)[-2:]) if layout.reshard else sum(blocks)
    always = sum(unit.gathered for unit in root)
    return round(always + max(computed, 8 * sum(unit.trained for unit in root) - beside))
