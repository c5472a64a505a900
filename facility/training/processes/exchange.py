"""Small values between ranks, as JSON in byte tensors.

torch's own collectives of Python objects unpickle what arrives, so any process in the group could run code in all
others. JSON only ever becomes plain data.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

LARGEST_BYTES = 64_000_000
"""Largest value of one rank as JSON; a larger announced size is an error, not an allocation."""


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The JSON value of every rank of the group (None: of all), in order of rank, on every rank."""
    own = encode(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([own.numel()]), group=group)
    counts = [checked_size(int(size)) for size in sizes]
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: own.numel()] = own
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded, group=group)
    return [decode(data[:count]) for data, count in zip(gathered, counts, strict=True)]


def broadcast_json(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """The JSON value of the group's first rank (None: of all ranks), on every rank; other values are ignored."""
    here = dist.get_rank(group) == 0
    own = encode(value) if here else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([own.numel()])
    dist.broadcast(size, group_src=0, group=group)
    data = own if here else torch.empty(checked_size(int(size)), dtype=torch.uint8)
    dist.broadcast(data, group_src=0, group=group)
    return decode(data)


def encode(value: Any) -> torch.Tensor:
    """The value as JSON in a byte tensor; raises `TypeError` for anything but plain data."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def decode(data: torch.Tensor) -> Any:
    """The value in a byte tensor; raises `ValueError` for anything but JSON."""
    return json.loads(data.numpy().tobytes())


def checked_size(count: int) -> int:
    """The announced number of bytes; raises `ValueError` where no value of ours is that large."""
    if not 0 < count <= LARGEST_BYTES:
        raise ValueError(f"a rank announces a value of {count} bytes, expected 1 to {LARGEST_BYTES}")
    return count
