"""The mean of the global models of the last rounds, as a candidate for the final model.

Averaging points of one trajectory of training (P. Izmailov et al., "Averaging weights leads to wider optima and better
generalization", UAI 2018, arXiv 1803.05407; of the latest ones alone: J. Kaddour, "Stop wasting my time! Saving days of
ImageNet and BERT training with latest weight averaging", 2022, arXiv 2209.14981). Whether it helps depends on how far
the learning rates have fallen, so it is a candidate that the facilities' validation data decide on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.archive.averaged import MEAN_OF
from facility.exchange.checkpoints.checkpoint import FLOATS, Checkpoint, TensorEntry, open_checkpoint
from facility.exchange.checkpoints.companions import copy_companions
from facility.exchange.checkpoints.delta_parts import as_bytes, raw_ranges, read_parts
from facility.exchange.checkpoints.floats import STORAGE, Array, narrow, widen
from facility.exchange.checkpoints.writer import TensorWriter, layout_like
from facility.exchange.errors import InputError
from facility.exchange.files.durable import new_directory
from facility.exchange.messages.manifest import read_manifest, write_manifest


def average(models: Sequence[Path], out: Path, rounds: Sequence[int]) -> None:
    """Write the mean of the models to the new directory `out`; peak memory is a few megabytes.

    Floating-point tensors are averaged in float32, float64 ones in float64, and stored in the dtype that they have in
    the last model; all other tensors and files are the last model's. Raises `InputError` where the models do not hold
    the same tensors.
    """
    every = [open_checkpoint(model) for model in models]
    last = every[-1]
    for one in every[:-1]:
        if _shapes(one) != _shapes(last):
            name = min(_shapes(one).items() ^ _shapes(last).items())[0]
            raise InputError(
                f"{one.directory} and {last.directory} differ in tensors, such as {name!r}: expected the same tensors "
                "in all models that are averaged"
            )
    with new_directory(out) as temporary:
        copy_companions(last.directory, temporary)
        layout = layout_like(last, {name: entry.dtype for name, entry in last.tensors.items()})
        with TensorWriter(temporary, layout, last.metadata) as writer:
            for name, entry in last.tensors.items():
                _write_mean(writer, name, [one.tensors[name] for one in every], entry)
        manifest = read_manifest(last.directory)
        extra = manifest.extra | {MEAN_OF: list(rounds)}
        write_manifest(temporary, dataclasses.replace(manifest, files={}, extra=extra))


def _write_mean(writer: TensorWriter, name: str, entries: list[TensorEntry], last: TensorEntry) -> None:
    if last.dtype not in FLOATS:
        for offset, content in raw_ranges(last):
            writer.write(name, offset, content)
        return
    arithmetic: type[np.floating[Any]] = (
        np.float64 if any(entry.dtype == "F64" for entry in (*entries, last)) else np.float32
    )
    for start, values in read_parts(entries):
        total: Array = np.zeros(len(values[0]), arithmetic)
        other: Array = np.empty(len(values[0]), arithmetic)
        for one, entry in zip(values, entries, strict=True):
            widen(one, entry.dtype, other)
            total += other
        total /= arithmetic(len(entries))
        stored = np.empty(len(total), STORAGE[last.dtype])
        narrow(total, last.dtype, stored, np.empty(len(total), np.uint32))
        writer.write(name, start * stored.itemsize, as_bytes(stored))


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[tuple[int, ...], bool]]:
    return {name: (tuple(entry.shape), entry.dtype in FLOATS) for name, entry in checkpoint.tensors.items()}
