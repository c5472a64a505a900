"""Which tensor of an update stands for which tensor of the base model, tied weights included.

Hugging Face writes a tied weight once, other writers write it twice. A name that only one side has is accepted when
its content is, byte for byte, another tensor that both have; anything else is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from facility.exchange.checkpoints.checkpoint import FLOATS, Checkpoint, TensorEntry, read_exactly
from facility.exchange.errors import UpdateRefused

CHUNK = 8 << 20


def same_bytes(first: TensorEntry, second: TensorEntry) -> bool:
    """Whether two stored tensors are equal in dtype, shape and every byte."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    a, b = bytearray(min(CHUNK, first.size)), bytearray(min(CHUNK, first.size))
    one, two = os.open(first.file, os.O_RDONLY), os.open(second.file, os.O_RDONLY)
    try:
        for offset in range(0, first.size, CHUNK):
            count = min(CHUNK, first.size - offset)
            read_exactly(one, memoryview(a)[:count], first.start + offset, first.file)
            read_exactly(two, memoryview(b)[:count], second.start + offset, second.file)
            if a[:count] != b[:count]:
                return False
    finally:
        os.close(one)
        os.close(two)
    return True


def _twin(checkpoint: Checkpoint, name: str) -> str | None:
    """Another tensor of the same checkpoint with the same bytes."""
    entry = checkpoint.tensors[name]
    for other, candidate in sorted(checkpoint.tensors.items()):
        if other != name and candidate.size == entry.size and same_bytes(entry, candidate):
            return other
    return None


def match_tensors(
    base: Checkpoint, update: Checkpoint, facility: str, *, federated: Callable[[str], bool] = lambda name: True
) -> dict[str, TensorEntry]:
    """The update's entry for every federated tensor of the base.

    Raises `UpdateRefused` for other names, shapes or kinds of dtype, and for a buffer that is not floating point and
    differs from the base's. Tensors that are not federated may be absent and are not looked at.
    """
    matched: dict[str, TensorEntry] = {}
    missing, surplus = [], []
    for name in base.tensors:
        if not federated(name):
            continue
        entry = update.tensors.get(name)
        if entry is None:
            twin = _twin(base, name)
            entry = update.tensors.get(twin) if twin else None
        if entry is None:
            missing.append(name)
        else:
            matched[name] = entry
    for name in update.tensors:
        if name not in base.tensors and federated(name):
            twin = _twin(update, name)
            if twin is None or twin not in base.tensors:
                surplus.append(name)
    if missing or surplus:
        raise UpdateRefused(
            facility,
            f"its tensors are not the base model's: {len(missing)} missing {sorted(missing)[:3]}, "
            f"{len(surplus)} unknown {sorted(surplus)[:3]}; it was made from another model",
        )
    for name, entry in matched.items():
        own = base.tensors[name]
        if entry.shape != own.shape:
            raise UpdateRefused(
                facility, f"tensor {name!r} has shape {list(entry.shape)}, expected {list(own.shape)} as in the base"
            )
        if (own.dtype in FLOATS) != (entry.dtype in FLOATS) or (own.dtype not in FLOATS and entry.dtype != own.dtype):
            raise UpdateRefused(
                facility, f"tensor {name!r} has dtype {entry.dtype}, expected {own.dtype} or a float for a float"
            )
        if own.dtype not in FLOATS and not same_bytes(own, entry):
            raise UpdateRefused(
                facility,
                f"tensor {name!r} ({own.dtype}) differs from the base's; only floating-point tensors can be averaged, "
                "exclude it by a pattern if it is personal",
            )
    return matched
