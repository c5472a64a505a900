"""How many micro-batches a device holds at once, and the bytes that takes. It depends on the order of its ops alone."""

from __future__ import annotations

from collections.abc import Sequence

from facility.exchange.schedules.ops import Kind, Op


def peak(ops: Sequence[Op], bytes_of_chunk: Sequence[float]) -> float:
    """Largest sum over live micro-batches: live from forward to backward (of the weights, where backward is split)."""
    now = most = 0.0
    for op in ops:
        if op.kind == Kind.FORWARD:
            now += bytes_of_chunk[op.chunk]
            most = max(most, now)
        elif op.kind in (Kind.BACKWARD, Kind.WEIGHT):
            now -= bytes_of_chunk[op.chunk]
    return most
