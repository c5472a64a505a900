"""What a rank of a pipeline computes and waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """What a rank computes."""

    FORWARD = 0
    BACKWARD = 1
    """Whole backward: for the input and for the weights."""
    INPUT = 2
    """Backward for the input only: what the previous chunk waits for."""
    WEIGHT = 3
    """Backward for the weights only: no other stage waits for it."""


@dataclass(frozen=True, slots=True)
class Op:
    """One computation of one rank."""

    kind: Kind
    chunk: int
    """Position in the chain of chunks; chunk k runs on rank k % stages."""
    micro_batch: int
    waits_send_of: int = -1
    """Blocking transport: index of an earlier op of this rank whose message must have left before this one starts."""
    waits_before_receiving: bool = False
    """Blocking transport: that wait also comes before this op's receive is posted."""
    receives_after: int = -1
    """Blocking transport: this op's receive is posted when the op of this index has ended; -1: at the start."""


def peak_bytes(ops: Sequence[Op], bytes_of_chunk: Sequence[float] | Mapping[int, float]) -> float:
    """Largest sum over live micro-batches: live from forward to backward (of the weights, where backward is split)."""
    now = most = 0.0
    for op in ops:
        if op.kind == Kind.FORWARD:
            now += bytes_of_chunk[op.chunk]
            most = max(most, now)
        elif op.kind in (Kind.BACKWARD, Kind.WEIGHT):
            now -= bytes_of_chunk[op.chunk]
    return most
