"""Whether adapters fit the model they were trained on."""

from __future__ import annotations

from coordinator.aggregation import lora
from facility.exchange.checkpoints.adapters import HEADS, PREFIX, A, is_adapter, is_factor, saves, targeted
from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.errors import InputError, UpdateRefused
from facility.exchange.messages.layout import LoraSettings


def check_adapters(base: Checkpoint, update: Checkpoint, facility: str) -> None:
    """Refuse adapters that do not fit the base: other than its own, or for layers it does not have."""
    try:
        names = lora.pairs(update.tensors)
    except InputError as error:
        raise UpdateRefused(facility, str(error)) from None
    if not names:
        raise UpdateRefused(facility, "its manifest says encoding lora, but it holds no adapter")
    own = {name: entry for name, entry in base.tensors.items() if is_adapter(name)}
    if own:
        if {n: e.shape for n, e in own.items()} != {n: e.shape for n, e in update.tensors.items()}:
            odd = sorted(set(own) ^ set(update.tensors)) or [n for n in own if own[n].shape != update.tensors[n].shape]
            raise UpdateRefused(facility, f"its adapters are not the base model's: {odd[:3]} differ in name or shape")
        return
    for name, entry in update.tensors.items():
        plain = base.tensors.get(name.removeprefix(PREFIX))
        if is_factor(name):
            continue
        if not name.startswith(PREFIX):
            raise UpdateRefused(facility, f"beside its adapters it holds {name!r}, which none of them trains")
        if plain is not None and plain.shape != entry.shape:
            raise UpdateRefused(facility, f"{name!r} has shape {list(entry.shape)}, the model's {list(plain.shape)}")
    for a, b in names:
        layer = a.removeprefix(PREFIX).partition(A)[0] + ".weight"
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


def check_told(base: Checkpoint, update: Checkpoint, told: LoraSettings, facility: str) -> None:
    """Refuse adapters of another rank or for other layers than the facilities were asked to train."""
    for name in update.tensors:
        module = name.removeprefix(PREFIX).rpartition(".")[0]
        if not is_factor(name) and not saves(module, told.modules_to_save or HEADS):
            raise UpdateRefused(
                facility, f"it brings {module!r} whole, which training.lora.modules_to_save do not name"
            )
    layers = set()
    for a, _ in lora.pairs(update.tensors):
        layers.add(a.removeprefix(PREFIX).partition(A)[0])
        if (rank := update.tensors[a].shape[0]) != told.rank:
            raise UpdateRefused(facility, f"adapter {a!r} has rank {rank}, expected {told.rank} (training.lora.rank)")
    if not told.targets or any(map(is_adapter, base.tensors)):
        return

    if strangers := sorted(layer for layer in layers if not targeted(layer, told.targets)):
        raise UpdateRefused(facility, f"it has adapters for {strangers[:3]}, which training.lora.targets do not name")
    matrices = {n.removesuffix(".weight") for n, e in base.tensors.items() if len(e.shape) == 2 and ".weight" in n}
    if missing := sorted(layer for layer in matrices - layers if targeted(layer, told.targets)):
        raise UpdateRefused(facility, f"it lacks adapters for {missing[:3]}, which training.lora.targets name")
