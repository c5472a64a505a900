"""What updates are expected to hold: whole models or adapters, and which adapters.

The coordinator's settings and the base model decide. Where neither does (an aggregation by hand), the majority of the
updates does, and no majority is an error that names no facility: one update never decides what the others must be.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from coordinator.aggregation.adapter_fit import check_adapters, check_as_agreed
from coordinator.aggregation.updates import Update
from facility.exchange.checkpoints.adapters import PREFIX, A, is_adapter
from facility.exchange.checkpoints.checkpoint import ITEM_BYTES, Checkpoint
from facility.exchange.errors import InputError, UpdateRefused
from facility.exchange.messages.layout import LoraSettings

Drop = Callable[[UpdateRefused], None]
Shapes = frozenset[tuple[str, tuple[int, ...]]]
Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each adapter tensor."""
K = TypeVar("K")
BLOCK = re.compile(r"\.\d+\.")
"""In the name of a tensor that lies in a numbered block."""


def agreed_encoding(updates: Sequence[Update], agreed: LoraSettings | None, drop: Drop) -> tuple[bool, list[Update]]:
    """Whether the round is of adapters alone, and the updates that are what was agreed."""
    if agreed is not None:
        wanted = agreed.rank > 0
    else:
        wanted = _majority(
            [update.adapters for update in updates],
            "some updates are adapters (encoding lora) and some are whole models",
        )
    kept = []
    for update in updates:
        if update.adapters == wanted:
            kept.append(update)
            continue
        is_, expected = ("adapters", "a whole model") if update.adapters else ("a whole model", "adapters")
        drop(UpdateRefused(update.facility, f"it holds {is_}, expected {expected} as agreed"))
    return wanted, kept


def agreed_layout(
    updates: Sequence[Update], base: Checkpoint, agreed: LoraSettings | None, drop: Drop
) -> tuple[Layout, list[Update]]:
    """The adapters of the round, and the updates that hold them."""
    fitting: list[Update] = []
    for update in updates:
        try:
            check_adapters(base, update.checkpoint, update.facility, agreed)
            if agreed is not None:
                check_as_agreed(base, update.checkpoint, agreed, update.facility)
            fitting.append(update)
        except UpdateRefused as refusal:
            drop(refusal)
    own = {name: (entry.dtype, entry.shape) for name, entry in base.tensors.items() if is_adapter(name)}
    if own or not fitting:
        return own, fitting
    shapes = _wanted_shapes(fitting, base)
    kept: list[Update] = []
    for update in fitting:
        if _shapes(update) == shapes:
            kept.append(update)
        else:
            odd = sorted(name for name, _ in _shapes(update) ^ shapes)[:3]
            drop(
                UpdateRefused(
                    update.facility, f"its adapters are not those of the others: {odd} differ in name or shape"
                )
            )
    names = sorted(kept[0].checkpoint.tensors)
    return {name: (_dtype(kept, name), kept[0].checkpoint.tensors[name].shape) for name in names}, kept


def _wanted_shapes(updates: Sequence[Update], base: Checkpoint) -> Shapes:
    """The adapters of every matrix of the blocks where some update holds just these, else what most updates hold."""
    found = [_shapes(update) for update in updates]
    if len(set(found)) == 1:
        return found[0]
    whole = {
        name.removesuffix(".weight") for name, e in base.tensors.items() if len(e.shape) == 2 and BLOCK.search(name)
    }
    usual = [s for s in found if {n.removeprefix(PREFIX).partition(A)[0] for n, _ in s if A in n} == whole]
    return _majority(usual or found, "the updates hold adapters of different ranks or layers; set training.lora")


def _majority(found: Sequence[K], problem: str) -> K:
    """The value that more than half have. Raises `InputError`, which names no facility."""
    value, count = Counter(found).most_common(1)[0] if found else (False, 0)
    if found and 2 * count <= len(found):
        raise InputError(f"{problem}: all must be alike, and no majority says which")
    return value  # type: ignore[return-value]


def _shapes(update: Update) -> Shapes:
    return frozenset((name, entry.shape) for name, entry in update.checkpoint.tensors.items())


def _dtype(updates: Sequence[Update], name: str) -> str:
    """What most updates store a tensor in; of several, the widest."""
    counts = Counter(update.checkpoint.tensors[name].dtype for update in updates)
    return max(counts, key=lambda dtype: (counts[dtype], ITEM_BYTES[dtype]))
