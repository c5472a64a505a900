"""Tensors that are one weight under several names, as a tied weight that is stored twice.

Names alone do not say it, so it is found by content: what is alike in the model and in every update of a round is one
weight for the round, and stays one. A rule that looks at names, for a random choice or for what is known of a tensor,
is given the same name for all of them. Else the copies come apart, and transformers, which ties only copies that are
alike, loads another model than was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from facility.exchange.checkpoints.checkpoint import TensorEntry, read_tensor
from facility.exchange.checkpoints.encoded import stored_of
from facility.exchange.checkpoints.twins import tensor_digest

FIRST_BYTES = 4096
"""Of a tensor, which nearly always distinguish it from others."""
Alike = Callable[[TensorEntry], bytes]


def one_weight(base: Mapping[str, TensorEntry], updates: Sequence[Mapping[str, TensorEntry]]) -> dict[str, list[str]]:
    """The names of each weight that has several, by each of them, in the order of `base`.

    Reads the first bytes of tensors of one shape, and the whole of those alone that begin alike.
    """
    groups = [list(base)]
    for source in (base, *updates):
        for read in (_first_bytes, tensor_digest):
            groups = [part for group in groups for part in _parted(group, source, read) if len(part) > 1]
    return {name: group for group in groups for name in group}


def _parted(names: Sequence[str], source: Mapping[str, TensorEntry], read: Alike) -> list[list[str]]:
    """The names, parted by shape, dtype and what `read` finds of what is stored for them; alone of its shape: left."""
    by_shape: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name in names:
        by_shape.setdefault((source[name].dtype, source[name].shape), []).append(name)
    found: dict[tuple[object, ...], list[str]] = {}
    for kind, alike in by_shape.items():
        for name in alike if len(alike) > 1 else ():
            key = tuple((field.dtype, field.shape, read(field)) for field in stored_of(source[name]))
            found.setdefault((*kind, key), []).append(name)
    return list(found.values())


def _first_bytes(entry: TensorEntry) -> bytes:
    buffer = bytearray(min(FIRST_BYTES, entry.size))
    read_tensor(entry, memoryview(buffer))
    return bytes(buffer)
