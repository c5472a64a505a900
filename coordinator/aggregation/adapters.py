"""Rounds whose updates are adapters alone (manifest encoding `lora`).

The base is a checkpoint without adapters (first round), one with adapter tensors in it, or adapters alone. The next
model holds the base's own tensors, if any, as they were, and the averaged adapters beside them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.aggregation import lora
from coordinator.aggregation.expected import Layout
from coordinator.aggregation.factor_errors import FactorErrors
from coordinator.aggregation.magnitudes import first_magnitudes
from coordinator.aggregation.stored_names import stored_parameter, value_of
from coordinator.aggregation.updates import Update
from coordinator.aggregation.work import NotFinite
from facility.exchange.checkpoints.adapters import (
    CONFIG,
    PREFIX,
    A,
    is_adapter,
    is_factor,
    is_magnitude,
    read_adapter_config,
)
from facility.exchange.checkpoints.begun_adapters import begun_factor
from facility.exchange.checkpoints.checkpoint import ADAPTER, FLOATS, SINGLE, Checkpoint, TensorEntry, open_checkpoint
from facility.exchange.checkpoints.floats import STORAGE, Array, narrow
from facility.exchange.checkpoints.writer import Layout as FileLayout
from facility.exchange.checkpoints.writer import Planned, TensorWriter, layout_like
from facility.exchange.errors import InputError, ManifestError
from facility.exchange.messages.layout import LoraSettings


def adapter_base(base: Checkpoint, layout: Layout, scratch: Path, seed: int | None) -> tuple[Checkpoint, bool]:
    """The adapters that updates are compared with, and whether they are new: then at `scratch`, factors as facilities
    draw them from the federation's `seed`, modules that are saved whole as in the base, and magnitudes (DoRA) as the
    rows of the base's weights. None: factors of zeros, so that an update's step is all that it holds."""
    own = {name: entry for name, entry in base.tensors.items() if is_adapter(name)}
    if own:
        return dataclasses.replace(base, tensors=own), False
    planned = [Planned(name=n, dtype=d, shape=shape) for n, (d, shape) in sorted(layout.items()) if d in FLOATS]
    with TensorWriter(scratch, {SINGLE: planned}) as writer:  # files of the final size, all zero
        for one in planned:
            if is_magnitude(one.name):
                if (lengths := first_magnitudes(base, one.name)) is not None:
                    _write(writer, one.name, lengths)
            elif is_factor(one.name):
                if seed is not None:
                    _write(writer, one.name, begun_factor(seed, one.name, one.shape))
            elif held := stored_parameter(base, one.name.removeprefix(PREFIX)):
                _write(writer, one.name, held.values())
    return dataclasses.replace(open_checkpoint(scratch), directory=base.directory), True


def settings_of(updates: Sequence[Update], agreed: LoraSettings | None) -> LoraSettings:
    """Rank and scale for adapter_config.json: from the facilities' settings, else as most updates state."""
    if agreed is not None and agreed.rank:
        return agreed
    rank = next(e.shape[0] for n, e in updates[0].checkpoint.tensors.items() if A in n)
    claimed = Counter(filter(None, (_alpha(update.directory) for update in updates)))
    alpha = next((value for value, count in claimed.most_common(1) if 2 * count > len(updates)), None)
    if alpha is None and claimed:
        raise InputError(f"the updates' {CONFIG} differ in lora_alpha ({sorted(claimed)}): set training.lora.alpha")
    rslora = all(_claims(update.directory).get("use_rslora") is True for update in updates)
    dora = any(map(is_magnitude, updates[0].checkpoint.tensors))
    return LoraSettings(rank=rank, alpha=alpha or float(rank), rslora=rslora, dora=dora)


def _alpha(directory: Path) -> float | None:
    """`lora_alpha` of an adapter_config.json that a facility wrote; None where there is no plausible one."""
    value: Any = _claims(directory).get("lora_alpha")
    return float(value) if type(value) in (int, float) and 0 < value < 1e6 else None


def _claims(directory: Path) -> dict[str, Any]:
    """What a facility's adapter_config.json says; empty where it cannot be read."""
    try:
        return read_adapter_config(directory)
    except ManifestError:
        return {}


def layout_with(base: Checkpoint, adapters: Checkpoint, dtypes: Mapping[str, str]) -> FileLayout:
    """The base's own files, and the adapters in one more, which has peft's name for it: peft and transformers look for
    adapters in no other file."""
    own = layout_like(base, {name: entry.dtype for name, entry in base.tensors.items()} | dict(dtypes))
    files = dict(own)
    of_adapters = [name for name, tensors in own.items() if all(is_adapter(one.name) for one in tensors)]
    new = [
        Planned(name=n, dtype=dtypes[n], shape=e.shape) for n, e in adapters.tensors.items() if n not in base.tensors
    ]
    if not new and len(of_adapters) == 1:
        new = list(files.pop(of_adapters[0]))
    return {**files, ADAPTER: new} if new else files


def write_products(
    opened: Sequence[Update],
    weights: Sequence[float],
    clipping: Sequence[float],
    *,
    base: Mapping[str, TensorEntry],
    kept: Mapping[str, TensorEntry],
    model: TensorWriter,
    master: TensorWriter | None,
    errors: FactorErrors,
    rate: float,
) -> float:
    """Write the refactorised mean of the products to the model, and in float32 to the master; returns the squared norm
    of the change of all that is written.

    `kept`: the master that `base` was rounded from; tensors absent there start from `base`. Every update counts as its
    step from `base` and the master together, so that what half precision cannot hold is not lost. `clipping`: what each
    step is multiplied by; `rate`: what the step of their mean is, which is a weighted mean of that and the master.
    """
    changed = 0.0
    shares = list(weights) if rate == 1 else [*(weight * rate for weight in weights), 1 - rate]

    def values_of(name: str) -> list[Array]:
        found = [value_of(update.entries[name]) for update in opened]
        if name not in kept and all(factor == 1 for factor in clipping):
            return found
        before, start = value_of(base[name]), start_of(name)
        return [start + factor * (one - before) for one, factor in zip(found, clipping, strict=True)]

    def start_of(name: str) -> Array:
        return value_of(kept.get(name, base[name]))

    def with_start(name: str, found: list[Array]) -> list[Array]:
        return found if rate == 1 else [*found, start_of(name)]

    for a, b in lora.pairs(opened[0].entries):
        first, second = values_of(a), values_of(b)
        rank = first[0].shape[0]
        result = best = lora.mean_of_products(first, second, weights, rank)
        if rate != 1:
            result = lora.mean_of_products(with_start(a, first), with_start(b, second), shares, rank)
        errors.add(a, b, first, second, best)
        for name, values in zip((a, b), result, strict=True):
            changed += float(np.square(values - start_of(name)).sum())
            _write_both(name, values, model, master)
    for name in opened[0].entries:
        if not is_factor(name):  # a module that is saved whole
            values = np.tensordot(np.asarray(shares), np.stack(with_start(name, values_of(name))), 1)
            changed += float(np.square(values - start_of(name)).sum())
            _write_both(name, values, model, master)
    return changed


def _write_both(name: str, values: Array, model: TensorWriter, master: TensorWriter | None) -> None:
    for writer in (model, master):
        if writer is not None:
            _write(writer, name, values)


def _write(writer: TensorWriter, name: str, values: Array) -> None:
    """Write a tensor in the dtype that is planned for it. Raises `NotFinite` where a value does not fit that."""
    dtype = writer.places[name][2].dtype
    block = np.empty(values.size, STORAGE[dtype])
    if not narrow(np.ascontiguousarray(values).reshape(-1), dtype, block, np.empty(values.size, np.uint32)):
        raise NotFinite(name, dtype, None)
    writer.write(name, 0, block.data.cast("B"))
