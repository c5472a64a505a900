"""A late update, as if it had started from the model of the round that averages it.

A facility trained from the model of an earlier round, and the models in between already hold what others learned
since. What counts is its own step, its weights minus those that it started from (FedBuff: Nguyen et al. 2022, arXiv
2106.06581, algorithm 1, lines 7 to 9): that step is added to the present model, in float32, or
in float64 where one of the three holds it.

Second moments that it brings begin with the present ones as well (`coordinator.aggregation.rebase_moments`).

Running statistics of batch normalisation are no steps: a facility's stay what it saw, as they are averaged, since a
variance moved by how much another one fell may be below zero.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from coordinator.aggregation.rebase_moments import rebase_moments
from facility.exchange.checkpoints.checkpoint import FLOATS, INDEX, Checkpoint, TensorEntry, open_checkpoint
from facility.exchange.checkpoints.delta_decoding import DECODED, TRAVELLED
from facility.exchange.checkpoints.delta_parts import as_bytes, raw_ranges, read_parts
from facility.exchange.checkpoints.floats import STORAGE, widen
from facility.exchange.checkpoints.running_statistics import is_running_statistic
from facility.exchange.checkpoints.twins import Twins
from facility.exchange.checkpoints.writer import TensorWriter, layout_like
from facility.exchange.errors import CheckpointError, UpdateRefused
from facility.exchange.files.durable import new_directory
from facility.exchange.files.links import link_files
from facility.exchange.messages.manifest import NAME, bytes_of, read_manifest, write_manifest

MADE = "made_sha256"
"""In `extra` of a late update that was moved: the digest of its content as its facility made it."""


def rebase(update: Path, *, then: Path, now: Path, out: Path, facility: str) -> None:
    """Write `update` + (`now` - `then`) to the new directory `out`; peak memory is a few megabytes.

    `then`: the model that the update started from, `now`: that of the round which averages it. The manifest keeps the
    update's own round, from which its weight follows. A tied weight that only the update stores twice is left out once.
    Raises `UpdateRefused` naming `facility` where another floating-point tensor of the update is not in both models
    with the same shape.
    """
    trained, started, present = open_checkpoint(update), open_checkpoint(then), open_checkpoint(now)
    steps, dtypes = _steps(trained, started, present, facility), dict[str, str]()
    for name, entry in trained.tensors.items():
        if name in steps:
            dtypes[name] = _moved_dtype(entry, started, present)
        elif entry.dtype not in FLOATS or is_running_statistic(name):
            dtypes[name] = entry.dtype
    with new_directory(out) as temporary:
        _link_others(update, temporary, trained, _moments(trained, started, present, temporary, facility))
        with TensorWriter(temporary, layout_like(trained, dtypes), trained.metadata) as writer:
            for name in dtypes:
                entry = trained.tensors[name]
                if name in steps:
                    _write_moved(writer, entry, started.tensors[name], present.tensors[name])
                else:
                    for offset, content in raw_ranges(entry):
                        writer.write(name, offset, content)
        manifest, written = read_manifest(update), open_checkpoint(temporary)
        extra = manifest.extra | {MADE: manifest.content_sha256}
        extra |= {} if DECODED in extra else {TRAVELLED: bytes_of(manifest)}
        write_manifest(temporary, dataclasses.replace(manifest, dtypes=written.dtypes(), files={}, extra=extra))


def _steps(trained: Checkpoint, started: Checkpoint, present: Checkpoint, facility: str) -> list[str]:
    """The tensors of an update that are moved. Raises `UpdateRefused` for what is not in both models."""
    found, twins = [], Twins(trained)
    for name, entry in trained.tensors.items():
        if entry.dtype not in FLOATS or is_running_statistic(name):
            continue
        lacking = [m for m in (started, present) if name not in m.tensors or m.tensors[name].shape != entry.shape]
        if not lacking:
            found.append(name)
        elif any(name in m.tensors for m in lacking) or not twins.of(name, started.tensors):
            raise UpdateRefused(facility, f"tensor {name!r} of its late update is not in {lacking[0].directory}")
    return found


def _moments(trained: Checkpoint, started: Checkpoint, present: Checkpoint, directory: Path, facility: str) -> set[str]:
    """The folders of moments that were written to `directory`. Raises `UpdateRefused` for what no moments are."""
    try:
        return rebase_moments(trained, started, present, directory)
    except CheckpointError as error:
        raise UpdateRefused(facility, f"its moments cannot be used: {error}") from None


def _link_others(update: Path, directory: Path, trained: Checkpoint, moved: set[str]) -> None:
    """Link what an update holds beside its tensors, its manifest and what was `moved`."""
    written = {entry.file.name for entry in trained.tensors.values()} | {NAME, INDEX} | moved
    link_files(update, directory, leave=written)


def _moved_dtype(entry: TensorEntry, *models: Checkpoint) -> str:
    """Of the arithmetic: as the aggregation's, float64 where a value may need it."""
    return "F64" if "F64" in (entry.dtype, *(model.tensors[entry.name].dtype for model in models)) else "F32"


def _write_moved(writer: TensorWriter, trained: TensorEntry, then: TensorEntry, now: TensorEntry) -> None:
    """Write `trained` - `then` + `now` in the dtype of its place in the file, part by part."""
    dtype = STORAGE[writer.places[trained.name][2].dtype]
    for start, (one, before, after) in read_parts([trained, then, now]):
        moved, other = np.empty(len(one), dtype), np.empty(len(one), dtype)
        widen(one, trained.dtype, moved)
        widen(before, then.dtype, other)
        moved -= other
        widen(after, now.dtype, other)
        moved += other
        writer.write(trained.name, start * moved.itemsize, as_bytes(moved))
