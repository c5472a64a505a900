"""Rounds whose updates are adapters alone (manifest encoding `lora`).

The base is a checkpoint without adapters (first round), one with adapter tensors in it, or adapters alone. The next
model holds the base's own tensors, if any, as they were, and the averaged adapters beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.aggregation import lora
from coordinator.aggregation.adapter_fit import check_adapters
from coordinator.aggregation.updates import Update
from facility.exchange.checkpoints.checkpoint import FLOATS, SINGLE, Checkpoint, TensorEntry, open_checkpoint
from facility.exchange.checkpoints.floats import STORAGE, Array, narrow, widen
from facility.exchange.checkpoints.writer import Layout, Planned, TensorWriter, layout_like
from facility.exchange.errors import CheckpointError, InputError, UpdateRefused
from facility.exchange.messages.manifest import NAME, read_manifest


def are_adapters(directories: Sequence[Path]) -> bool:
    """Whether the updates are adapters alone; `InputError` when only some are."""
    found = [(Path(d) / NAME).exists() and read_manifest(d).encoding == "lora" for d in directories if Path(d).is_dir()]
    if any(found) and not all(found):
        raise InputError("some updates are adapters (encoding lora) and some are whole models: all must be alike")
    return any(found)


def adapter_base(base: Checkpoint, updates: Sequence[Path], scratch: Path) -> tuple[Checkpoint, bool]:
    """The adapters that updates are compared with, and whether they are new: zeros at `scratch` where the base has none."""
    own = {name: entry for name, entry in base.tensors.items() if lora.is_adapter(name)}
    if own:
        return dataclasses.replace(base, tensors=own), False
    first = sorted(map(Path, updates), key=lambda d: read_manifest(d).facility or "")[0]
    facility = read_manifest(first).facility or first.name
    try:
        model = open_checkpoint(first)
    except CheckpointError as error:
        raise UpdateRefused(facility, str(error)) from None
    check_adapters(base, model, facility)
    planned = [
        Planned(name=n, dtype=e.dtype, shape=e.shape) for n, e in sorted(model.tensors.items()) if e.dtype in FLOATS
    ]
    with TensorWriter(scratch, {SINGLE: planned}):
        pass  # files of the final size, all zero
    return dataclasses.replace(open_checkpoint(scratch), directory=base.directory), True


def layout_with(base: Checkpoint, adapters: Checkpoint, dtypes: Mapping[str, str]) -> Layout:
    """The base's own files, and one more for adapters that it does not hold yet."""
    own = layout_like(base, {name: entry.dtype for name, entry in base.tensors.items()} | dict(dtypes))
    new = [
        Planned(name=n, dtype=dtypes[n], shape=e.shape) for n, e in adapters.tensors.items() if n not in base.tensors
    ]
    if not new:
        return own
    files = [*own.values(), new]
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": tensors for i, tensors in enumerate(files, start=1)}


def errors(opened: Sequence[Update], weights: Sequence[float]) -> dict[str, Any]:
    """How far the mean of the factors, and the best product of the same rank, are from the mean of the products."""
    factors, products = [], []
    for a, b in lora.pairs(opened[0].entries):
        first, second = _values(opened, a), _values(opened, b)
        mean_a, mean_b = (np.tensordot(np.asarray(weights), np.stack(values), 1) for values in (first, second))
        factors.append(lora.relative_error(mean_a, mean_b, first, second, weights))
        best = lora.mean_of_products(first, second, weights, first[0].shape[0])
        products.append(lora.relative_error(*best, first, second, weights))
    return {
        "error_of_factors": {"mean": float(np.mean(factors)), "largest": max(factors)},
        "error_of_product": {"mean": float(np.mean(products)), "largest": max(products)},
    }


def write_products(
    opened: Sequence[Update], weights: Sequence[float], model: TensorWriter, master: TensorWriter | None
) -> None:
    """Write the refactorised mean of the products to the model, and in float32 to the master."""
    for a, b in lora.pairs(opened[0].entries):
        first, second = _values(opened, a), _values(opened, b)
        result = lora.mean_of_products(first, second, weights, first[0].shape[0])
        for name, values in zip((a, b), result, strict=True):
            for writer in (model, master):
                if writer is not None:
                    dtype = writer.places[name][2].dtype
                    block = np.empty(values.size, STORAGE[dtype])
                    narrow(np.ascontiguousarray(values).reshape(-1), dtype, block, np.empty(values.size, np.uint32))
                    writer.write(name, 0, block.data.cast("B"))


def _values(opened: Sequence[Update], name: str) -> list[Array]:
    return [_value(update.entries[name]) for update in opened]


def _value(entry: TensorEntry) -> Array:
    raw = np.fromfile(entry.file, STORAGE[entry.dtype], entry.elements, offset=entry.start)
    out = np.empty(entry.elements, np.float64)
    widen(raw, entry.dtype, out)
    return out.reshape(entry.shape)
