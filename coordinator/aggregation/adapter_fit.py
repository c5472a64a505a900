"""Whether adapters fit the model they were trained on."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.aggregation import lora
from coordinator.aggregation.stored_names import stored_parameter
from facility.exchange.checkpoints.adapters import (
    HEADS,
    MAGNITUDE,
    PREFIX,
    A,
    B,
    adapts_parameter,
    is_adapter,
    is_added,
    is_factor,
    is_magnitude,
    is_saved_module,
    is_targeted,
)
from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.errors import InputError, UpdateRefused
from facility.exchange.messages.layout import LoraSettings


def check_adapters(base: Checkpoint, update: Checkpoint, facility: str, agreed: LoraSettings | None = None) -> None:
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
    for name in update.tensors:
        if not is_factor(name):
            _check_beside(base, update, name, facility)
    for a, b in names:
        _check_pair(base, update, a, b, facility, agreed.parameters if agreed is not None else ())


def _check_beside(base: Checkpoint, update: Checkpoint, name: str, facility: str) -> None:
    """A tensor that is not a factor: the magnitudes of an adapted layer, or part of a module that is trained whole."""
    entry, plain = update.tensors[name], stored_parameter(base, name.removeprefix(PREFIX))
    if not name.startswith(PREFIX):
        raise UpdateRefused(facility, f"beside its adapters it holds {name!r}, which none of them trains")
    if is_magnitude(name):
        factor = update.tensors.get(name.removesuffix(MAGNITUDE) + B + "weight")
        if factor is None or entry.shape != factor.shape[:1]:
            raise UpdateRefused(
                facility, f"magnitudes {name!r} of shape {list(entry.shape)} are for no layer of its adapters"
            )
    elif plain is not None and plain.shape != entry.shape:
        raise UpdateRefused(facility, f"{name!r} has shape {list(entry.shape)}, the model's {list(plain.shape)}")


def _check_pair(base: Checkpoint, update: Checkpoint, a: str, b: str, facility: str, parameters: Sequence[str]) -> None:
    """Both factors of a layer of the base, or of fused experts, whose stored names may be others."""
    layer = a.removeprefix(PREFIX).partition(A)[0]
    first, second = update.tensors[a], update.tensors[b]
    if len(first.shape) != 2 or len(second.shape) != 2 or first.shape[0] != second.shape[1]:
        raise UpdateRefused(facility, f"adapter {a!r} {list(first.shape)} does not fit {b!r} {list(second.shape)}")
    if adapts_parameter(layer, parameters):
        inside = layer.replace(".base_layer", "") + "."
        if not any(name.startswith(inside) for name in base.tensors):
            raise UpdateRefused(facility, f"adapter {a!r} is for experts that the base model does not have")
        return
    whole = stored_parameter(base, layer + ".weight")
    if whole is None:
        raise UpdateRefused(
            facility, f"adapter {a!r} is for the layer {layer + '.weight'!r}, which the base model does not have"
        )
    if sorted(whole.shape) != sorted((second.shape[0], first.shape[1])):
        raise UpdateRefused(
            facility,
            f"adapter {a!r} is for a layer of shape {[second.shape[0], first.shape[1]]}, not {list(whole.shape)}",
        )


def check_as_agreed(base: Checkpoint, update: Checkpoint, agreed: LoraSettings, facility: str) -> None:
    """Refuse adapters of another rank or for other layers than the facilities were asked to train."""
    _check_agreed_beside(update, agreed, facility)
    layers = set()
    for a, _ in lora.pairs(update.tensors):
        layer = a.removeprefix(PREFIX).partition(A)[0]
        rank, experts = update.tensors[a].shape[0], adapts_parameter(layer, agreed.parameters)
        if not experts:
            layers.add(layer)
        if rank % agreed.rank if experts else rank != agreed.rank:
            raise UpdateRefused(facility, f"adapter {a!r} has rank {rank}, expected {agreed.rank} (training.lora.rank)")
    if not agreed.targets or any(map(is_adapter, base.tensors)):
        return
    if strangers := sorted(layer for layer in layers if not is_targeted(layer, agreed.targets)):
        raise UpdateRefused(facility, f"it has adapters for {strangers[:3]}, which training.lora.targets do not name")
    matrices = {n.removesuffix(".weight") for n, e in base.tensors.items() if len(e.shape) == 2 and ".weight" in n}
    if missing := sorted(layer for layer in matrices - layers if is_targeted(layer, agreed.targets)):
        raise UpdateRefused(facility, f"it lacks adapters for {missing[:3]}, which training.lora.targets name")


def _check_agreed_beside(update: Checkpoint, agreed: LoraSettings, facility: str) -> None:
    """Magnitudes of every plain layer under `dora` and of none without; whole modules that were asked for."""
    for name in update.tensors:
        module = name.removeprefix(PREFIX).rpartition(".")[0]
        if not is_added(name) and not is_saved_module(module, agreed.modules_to_save or HEADS):
            raise UpdateRefused(
                facility, f"it brings {module!r} whole, which training.lora.modules_to_save do not name"
            )
    held = {name.removesuffix(MAGNITUDE) for name in update.tensors if is_magnitude(name)}
    layers = {a.partition(A)[0] for a, _ in lora.pairs(update.tensors)}
    wanted = layers if agreed.dora else set[str]()
    if odd := sorted(held ^ wanted):
        what = "lacks the magnitudes" if agreed.dora else "brings magnitudes"
        raise UpdateRefused(facility, f"it {what} of {odd[0]!r}, and training.lora.dora is {str(agreed.dora).lower()}")
