"""A late update, as if it had started from the model of the round that averages it.

A facility trained from the model of an earlier round, and the models in between already hold what others learned
since. What counts is its own step, its weights minus those that it started from (FedBuff: Nguyen et al. 2022, arXiv
2106.06581, algorithm 1, lines 7 to 9): that step is added to the present model, in float32, or
in float64 where one of the three holds it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from facility.exchange.checkpoints.checkpoint import FLOATS, Checkpoint, TensorEntry, open_checkpoint
from facility.exchange.checkpoints.delta_parts import as_bytes, parts, raw
from facility.exchange.checkpoints.floats import STORAGE, widen
from facility.exchange.checkpoints.writer import Planned, TensorWriter
from facility.exchange.errors import UpdateRefused
from facility.exchange.files.durable import new_directory
from facility.exchange.files.links import link_tree
from facility.exchange.messages.manifest import NAME, read_manifest, write_manifest

INDEX = "model.safetensors.index.json"


def rebase(update: Path, *, then: Path, now: Path, out: Path, facility: str) -> None:
    """Write `update` + (`now` - `then`) to the new directory `out`; peak memory is a few megabytes.

    `then`: the model that the update started from, `now`: that of the round which averages it. The manifest keeps the
    update's own round, from which its weight follows. Raises `UpdateRefused` naming `facility` where the update's
    floating-point tensors are not in both models with the same shapes.
    """
    trained, started, present = open_checkpoint(update), open_checkpoint(then), open_checkpoint(now)
    floats = [name for name, entry in trained.tensors.items() if entry.dtype in FLOATS]
    for name in floats:
        wanted = trained.tensors[name].shape
        for model in (started, present):
            if name not in model.tensors or model.tensors[name].shape != wanted:
                raise UpdateRefused(facility, f"tensor {name!r} of its late update is not in {model.directory}")
    with new_directory(out) as temporary:
        _link_others(update, temporary, trained)
        layout: dict[str, list[Planned]] = {}
        for name, entry in trained.tensors.items():
            dtype = _moved_dtype(entry, started, present) if name in floats else entry.dtype
            layout.setdefault(entry.file.name, []).append(Planned(name=name, dtype=dtype, shape=entry.shape))
        with TensorWriter(temporary, layout, trained.metadata) as writer:
            for name, entry in trained.tensors.items():
                if name in floats:
                    _write_moved(writer, entry, started.tensors[name], present.tensors[name])
                else:
                    for offset, content in raw(entry):
                        writer.write(name, offset, content)
        manifest, written = read_manifest(update), open_checkpoint(temporary)
        write_manifest(temporary, dataclasses.replace(manifest, dtypes=written.dtypes(), files={}))


def _link_others(update: Path, directory: Path, trained: Checkpoint) -> None:
    """Link what an update holds beside its tensors and its manifest."""
    weights = {entry.file.name for entry in trained.tensors.values()} | {NAME, INDEX}
    for path in sorted(update.iterdir()):
        if path.name in weights:
            continue
        if path.is_dir():
            link_tree(path, directory / path.name)
        else:
            (directory / path.name).hardlink_to(path)


def _moved_dtype(entry: TensorEntry, *models: Checkpoint) -> str:
    """Of the arithmetic: as the aggregation's, float64 where a value may need it."""
    return "F64" if "F64" in (entry.dtype, *(model.tensors[entry.name].dtype for model in models)) else "F32"


def _write_moved(writer: TensorWriter, trained: TensorEntry, then: TensorEntry, now: TensorEntry) -> None:
    """Write `trained` - `then` + `now` in the dtype of its place in the file, part by part."""
    dtype = STORAGE[writer.places[trained.name][2].dtype]
    for start, (one, before, after) in parts([trained, then, now]):
        moved, other = np.empty(len(one), dtype), np.empty(len(one), dtype)
        widen(one, trained.dtype, moved)
        widen(before, then.dtype, other)
        moved -= other
        widen(after, now.dtype, other)
        moved += other
        writer.write(trained.name, start * moved.itemsize, as_bytes(moved))
