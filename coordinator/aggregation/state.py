"""The float32 master and the server optimiser's tensors on disk: a directory of checkpoints, versioned with the round.

state/
  manifest.json      kind `state`, the round whose model this is the master of
  round.json         how it came about
  unchanged.json     which files of the model were verified and did not change, where there are such files
  master/            a checkpoint: model.safetensors, or shards and index
  velocity/ ...      one per tensor of the server optimiser
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from coordinator.aggregation.sources import Sources
from facility.exchange.checkpoints.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from facility.exchange.checkpoints.delta_parts import as_bytes, read_parts
from facility.exchange.checkpoints.floats import STORAGE, widen
from facility.exchange.checkpoints.writer import TensorWriter, layout_like
from facility.exchange.errors import CheckpointError, InputError
from facility.exchange.files import present
from facility.exchange.files.bounded import real_path
from facility.exchange.files.durable import new_directory
from facility.exchange.messages.manifest import (
    STATE,
    Manifest,
    read_manifest,
    tensor_files,
    verify_manifest,
    with_extra,
    write_manifest,
)

MASTER = "master"


def open_state(
    state: Path | None, base: Manifest | None, names: Sequence[str], sources: Sources | None
) -> dict[str, Checkpoint]:
    """The checkpoints `names` of a state directory; those it lacks start afresh. `sources` compares them as they are
    read; without it they are read and compared now.

    Raises `CheckpointError` unless the state is whole and of the same round and federation as the base.
    """
    if state is None:
        return {}
    later = tensor_files(read_manifest(state), names) if sources is not None else []
    manifest = verify_manifest(state, later=later)
    if manifest.kind != STATE:
        raise CheckpointError(f"{state} is a {manifest.kind!r}, expected the state of the round before")
    if base and (manifest.round, manifest.federation) != (base.round, base.federation):
        raise CheckpointError(
            f"{state} is the state for round {manifest.round} of {manifest.federation!r}, "
            f"but the base is the model of round {base.round} of {base.federation!r}"
        )
    if base and (sent := manifest.extra.get("model_sha256")) not in (None, base.content_sha256):
        raise CheckpointError(
            f"{state} is the state of another model (sha256 {sent:.12}) than the base ({base.content_sha256:.12})"
        )
    if sources is not None:
        sources.promise(Path(state), manifest, later)
    try:
        return {name: open_checkpoint(Path(state) / name) for name in names if present.is_dir(Path(state) / name)}
    except CheckpointError:
        verify_manifest(state)  # damage is named as such
        raise


def kept_by(state: Path | None) -> str:
    """Name of the server optimizer that a state is of; '' where there is none. Raises `ManifestError`."""
    return "" if state is None else str(read_manifest(state).extra.get("outer", ""))


def fitting(checkpoint: Checkpoint | None, floats: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The state's tensors for the federated ones; a tensor that was not federated before is left out."""
    if checkpoint is None:
        return {}
    for name in floats.keys() & checkpoint.tensors.keys():
        stored = checkpoint.tensors[name]
        if stored.shape != floats[name].shape or stored.dtype not in ("F32", "F64"):
            raise CheckpointError(
                f"{checkpoint.directory}: tensor {name!r} is {stored.dtype} {list(stored.shape)}, expected float32 or "
                f"float64 of shape {list(floats[name].shape)}: the state is of another model"
            )
    return {name: checkpoint.tensors[name] for name in floats if name in checkpoint.tensors}


def seal(
    directory: Path,
    *,
    federation: str,
    round: int,
    outer: str,
    parameters: int,
    model: Manifest | None,
    model_path: Path,
    known: Mapping[str, str],
) -> None:
    """Write the state's manifest; `round` is that of the model it belongs to, which will be at `model_path`.

    `known`: digests of files that were hashed as they were written.
    """
    extra = {"outer": outer, "model_path": str(model_path.absolute())} | (
        {"model_sha256": model.content_sha256} if model else {}
    )
    write_manifest(
        directory, Manifest(kind=STATE, federation=federation, round=round, parameters=parameters, extra=extra), known
    )


def belong_to(directory: Path, model: Manifest) -> None:
    """Say in a sealed state's manifest that it is the state of `model`."""
    with_extra(directory, "model_sha256", model.content_sha256)


def draw_near(directory: Path, model: Checkpoint, share: float) -> None:
    """Move a sealed state's float32 master in place by `share` of the way to `model`, and seal it again."""
    master, manifest = open_checkpoint(directory / MASTER), read_manifest(directory)
    aside = directory.with_name(f".{directory.name}.{MASTER}")
    shutil.rmtree(aside, ignore_errors=True)
    with new_directory(aside) as temporary:
        with TensorWriter(
            temporary,
            layout_like(master, {name: entry.dtype for name, entry in master.tensors.items()}),
            master.metadata,
        ) as writer:
            for name, entry in master.tensors.items():
                for start, (old, towards) in read_parts([entry, model.tensors[name]]):
                    wanted = np.empty(len(old), STORAGE[entry.dtype])
                    widen(towards, model.tensors[name].dtype, wanted)
                    wanted -= old
                    wanted *= share
                    wanted += old
                    writer.write(name, start * wanted.itemsize, as_bytes(wanted))
    shutil.rmtree(directory / MASTER)
    aside.rename(directory / MASTER)
    write_manifest(directory, dataclasses.replace(manifest, files={}))


def make_way(state: Path | None, model: Path) -> None:
    """Check that the outputs do not exist and lie apart.

    A state whose model never appeared is that of a killed run, and removed.
    """
    if state is not None:
        one, other = real_path(state), real_path(model)
        if one == other or one in other.parents or other in one.parents:
            raise InputError(
                f"--state-out is {state} and --out {model}; expected two directories, neither in the other"
            )
    if os.path.lexists(model):
        raise InputError(f"{model} exists already; remove it or choose another name for --out")
    if state is None or not os.path.lexists(state):
        return
    try:
        manifest = read_manifest(state)
    except CheckpointError:
        manifest = None
    if manifest and manifest.kind == STATE and manifest.extra.get("model_path") == str(Path(model).absolute()):
        shutil.rmtree(state)
        return
    raise InputError(f"{state} exists already; remove it or choose another name for --state-out")
