"""Tensors grouped into buckets of bounded size, and the bytes that a ring all-reduce sends."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def bucket_runs(tensors: list[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors of at most `limit` bytes in float32 together; a larger one is a run of its own."""
    run: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if run and size + 4 * tensor.numel() > limit:
            yield run
            run, size = [], 0
        run.append(tensor)
        size += 4 * tensor.numel()
    if run:
        yield run


def ring_bytes(size: int, members: int) -> int:
    """Bytes one member sends in a ring all-reduce of `size` bytes."""
    return 2 * size * (members - 1) // members
