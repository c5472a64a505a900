"""What a rank of a pipeline computes and waits for."""

from __future__ import annotations

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
