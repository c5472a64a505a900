"""Tensors of one checkpoint with the same bytes: a tied weight that a writer stored twice, and what looks like one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container
from functools import cached_property

from facility.exchange.checkpoints.checkpoint import Checkpoint, Opened, TensorEntry

CHUNK = 8 << 20


def same_bytes(first: TensorEntry, second: TensorEntry) -> bool:
    """Whether two stored tensors are equal in dtype, shape and every byte."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    a, b = bytearray(min(CHUNK, first.size)), bytearray(min(CHUNK, first.size))
    with Opened() as read:
        for offset in range(0, first.size, CHUNK):
            count = min(CHUNK, first.size - offset)
            read(first, offset, memoryview(a)[:count])
            read(second, offset, memoryview(b)[:count])
            if a[:count] != b[:count]:
                return False
    return True


class Twins:
    """Which tensors of one checkpoint hold the same bytes; every tensor is read at most once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.tensors = checkpoint.tensors
        self._groups: dict[str, list[str]] = {}

    @cached_property
    def _by_kind(self) -> dict[tuple[str, tuple[int, ...]], list[str]]:
        """Names by dtype and shape."""
        names: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for name, entry in sorted(self.tensors.items()):
            names.setdefault((entry.dtype, entry.shape), []).append(name)
        return names

    def of(self, name: str, among: Container[str]) -> list[str]:
        """Other tensors with the same bytes, of those in `among`."""
        if name not in self._groups:
            by_content: dict[bytes, list[str]] = {}
            for other in self._by_kind[self.tensors[name].dtype, self.tensors[name].shape]:
                group = by_content.setdefault(tensor_digest(self.tensors[other]), [])
                group.append(other)
                self._groups[other] = group
        return [other for other in self._groups[name] if other != name and other in among]

    def stored_in(self, update: Checkpoint, name: str) -> TensorEntry | None:
        """The tensor `name` as an update holds it that lacks the name: under a name of the same bytes here; None where
        it has no such name, or several whose bytes differ there."""
        twins = [update.tensors[twin] for twin in self.of(name, update.tensors)]
        return twins[0] if twins and all(same_bytes(twins[0], twin) for twin in twins[1:]) else None


def surplus_of(one: Checkpoint, other: Checkpoint, *, among: Callable[[str], bool] = lambda name: True) -> list[str]:
    """The tensors of `one` that `other` has neither under their name nor, with the same bytes in `one`, under another.

    `among`: whether a name is looked at. Of more than three the others are not compared.
    """
    found: list[str] = []
    twins = Twins(one)
    for name in one.tensors:
        if name not in other.tensors and among(name):
            if len(found) >= 3 or not twins.of(name, other.tensors):
                found.append(name)
    return found


def tensor_digest(entry: TensorEntry) -> bytes:
    """sha256 of a tensor's bytes, streaming."""
    digest, buffer = hashlib.sha256(), bytearray(min(CHUNK, entry.size))
    with Opened() as read:
        for offset in range(0, entry.size, CHUNK):
            view = memoryview(buffer)[: min(CHUNK, entry.size - offset)]
            read(entry, offset, view)
            digest.update(view)
    return digest.digest()
