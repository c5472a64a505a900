"""Whether adapters fit the model they were trained on."""

from __future__ import annotations

from coordinator.aggregation import lora
from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.errors import InputError, UpdateRefused

PREFIX = "base_model.model."
"""What peft puts before the names of the layers."""


def check_adapters(base: Checkpoint, update: Checkpoint, facility: str) -> None:
    """Refuse adapters that do not fit the base: other than its own, or for layers it does not have."""
    try:
        names = lora.pairs(update.tensors)
    except InputError as error:
        raise UpdateRefused(facility, str(error)) from None
    if not names:
        raise UpdateRefused(facility, "its manifest says encoding lora, but it holds no adapter")
    own = {name: entry for name, entry in base.tensors.items() if lora.is_adapter(name)}
    if own:
        if {n: e.shape for n, e in own.items()} != {n: e.shape for n, e in update.tensors.items()}:
            odd = sorted(set(own) ^ set(update.tensors)) or [n for n in own if own[n].shape != update.tensors[n].shape]
            raise UpdateRefused(facility, f"its adapters are not the base model's: {odd[:3]} differ in name or shape")
        return
    for a, b in names:
        layer = a.removeprefix(PREFIX).partition(lora.A)[0] + ".weight"
        first, second = update.tensors[a], update.tensors[b]
        whole = base.tensors.get(layer)
        if whole is None:
            raise UpdateRefused(
                facility, f"adapter {a!r} is for the layer {layer!r}, which the base model does not have"
            )
        if len(first.shape) != 2 or len(second.shape) != 2 or first.shape[0] != second.shape[1]:
            raise UpdateRefused(facility, f"adapter {a!r} {list(first.shape)} does not fit {b!r} {list(second.shape)}")
        if sorted(whole.shape) != sorted((second.shape[0], first.shape[1])):
            raise UpdateRefused(
                facility,
                f"adapter {a!r} is for a layer of shape {[second.shape[0], first.shape[1]]}, not {list(whole.shape)}",
            )
