"""Maps tensors of an update to tensors of the base model, tied weights included.

Hugging Face writes a tied weight once, other writers write it twice. A name that only one side has is accepted when
its content is, byte for byte, another tensor that both have; anything else is refused. In a new model all norms are
alike, and all biases: where several tensors of the update could be the one that it lacks, they must be alike there,
too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container
from functools import cached_property

from facility.exchange.checkpoints.checkpoint import FLOATS, Checkpoint, Opened, TensorEntry
from facility.exchange.errors import UpdateRefused

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
                group = by_content.setdefault(content_digest(self.tensors[other]), [])
                group.append(other)
                self._groups[other] = group
        return [other for other in self._groups[name] if other != name and other in among]


def content_digest(entry: TensorEntry) -> bytes:
    """sha256 of a tensor's bytes, streaming."""
    digest, buffer = hashlib.sha256(), bytearray(min(CHUNK, entry.size))
    with Opened() as read:
        for offset in range(0, entry.size, CHUNK):
            view = memoryview(buffer)[: min(CHUNK, entry.size - offset)]
            read(entry, offset, view)
            digest.update(view)
    return digest.digest()


def match_tensors(
    base: Checkpoint, update: Checkpoint, facility: str, *, federated: Callable[[str], bool]
) -> dict[str, TensorEntry]:
    """The update's entry for every federated tensor of the base.

    Raises `UpdateRefused` for other names, shapes or kinds of dtype, and for a buffer that is not floating point and
    differs from the base's. Tensors that are not federated may be absent and are not looked at.
    """
    matched = _paired(base, update, facility, federated)
    for name, entry in matched.items():
        _check_alike(name, base.tensors[name], entry, facility)
    return matched


def _paired(
    base: Checkpoint, update: Checkpoint, facility: str, federated: Callable[[str], bool]
) -> dict[str, TensorEntry]:
    """The update's entry by the base's names; of a tensor that it stores under another name of the same, that one."""
    matched: dict[str, TensorEntry] = {}
    missing: list[str] = []
    surplus: list[str] = []
    own_twins, their_twins = Twins(base), Twins(update)
    for name in base.tensors:
        if not federated(name):
            continue
        entry = update.tensors.get(name)
        if entry is None:
            twins = [update.tensors[twin] for twin in own_twins.of(name, update.tensors)]
            if twins and all(same_bytes(twins[0], twin) for twin in twins[1:]):
                entry = twins[0]
        if entry is None:
            missing.append(name)
        else:
            matched[name] = entry
    for name in update.tensors:
        if name not in base.tensors and federated(name):
            if len(surplus) >= 3 or not their_twins.of(name, base.tensors):
                surplus.append(name)
    if missing or surplus:
        raise UpdateRefused(
            facility,
            f"its tensors are not the base model's: {len(missing)} missing {sorted(missing)[:3]}, "
            f"{len(surplus)} unknown {sorted(surplus)[:3]}; it was made from another model",
        )
    return matched


def _check_alike(name: str, own: TensorEntry, entry: TensorEntry, facility: str) -> None:
    """Raise `UpdateRefused` unless an update's tensor can be averaged with the base's `own`."""
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
