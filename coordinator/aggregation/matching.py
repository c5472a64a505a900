"""Maps tensors of an update to tensors of the base model, tied weights included.

Hugging Face writes a tied weight once, other writers write it twice. A name that only one side has is accepted when
its content is, byte for byte, another tensor that both have; anything else is refused. In a new model all norms are
alike, and all biases: where several tensors of the update could be the one that it lacks, they must be alike there,
too.
"""

from __future__ import annotations

from collections.abc import Callable

from facility.exchange.checkpoints.checkpoint import FLOATS, Checkpoint, TensorEntry
from facility.exchange.checkpoints.twins import Twins, same_bytes, surplus_of
from facility.exchange.errors import UpdateRefused


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
    own_twins = Twins(base)
    for name in base.tensors:
        if not federated(name):
            continue
        entry = update.tensors.get(name) or own_twins.stored_in(update, name)
        if entry is None:
            missing.append(name)
        else:
            matched[name] = entry
    surplus = surplus_of(update, base, among=federated)
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
            f"tensor {name!r} ({own.dtype}) differs from the base's; only tensors of {', '.join(sorted(FLOATS))} can "
            "be averaged, exclude it by a pattern if it is personal",
        )
