"""Decode a message of `facility.exchange.checkpoints.delta` into a full model; each field is checked before use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from facility.exchange.checkpoints.checkpoint import (
    FLOATS,
    Checkpoint,
    TensorEntry,
    open_checkpoint,
    read_exactly,
    read_header,
)
from facility.exchange.checkpoints.companions import copy_companions
from facility.exchange.checkpoints.delta_parts import FILE, as_bytes, parts, raw
from facility.exchange.checkpoints.floats import STORAGE, Array, narrow, widen
from facility.exchange.checkpoints.step_norms import NAME as NORMS
from facility.exchange.checkpoints.step_norms import StepNorms
from facility.exchange.checkpoints.writer import TensorWriter, layout_like
from facility.exchange.delta_codecs import CODECS, FULL, Codec, load_codec
from facility.exchange.errors import CheckpointError
from facility.exchange.files.durable import new_directory
from facility.exchange.messages.manifest import Manifest, read_manifest, verify_manifest, write_manifest

DECODED = "decoded_from"
"""In `extra`: the encoding that a directory travelled in."""
INTEGERS = {"I8": "i1", "U8": "u1", "U16": "<u2", "I32": "<i4"}
"""numpy dtypes of the whole numbers that codecs store."""


def decode(message: Path, *, reference: Path, out: Path, norms: bool = False) -> Manifest:
    """Turn a message back into a full directory at `out`, which must not exist; returns its manifest.

    `norms`: write step_norms.json beside it, of the values as they are decoded, which reads nothing more.

    Raises `CheckpointError` when the message is altered or malformed, or when it was made from another reference.
    """
    manifest = verify_manifest(message)
    if manifest.encoding not in CODECS.names():
        raise CheckpointError(
            f"{message} has encoding {manifest.encoding!r}, this version decodes {', '.join(CODECS.names())}: "
            "send it in full"
        )
    base, expected = read_manifest(reference), manifest.extra.get("reference_sha256")
    if expected != base.content_sha256:
        raise CheckpointError(
            f"{message} is a difference to the model with sha256 {str(expected):.12}, but {reference} is "
            f"{base.content_sha256:.12}: the two sides hold different models; send it in full (encoding: full)"
        )
    codec, old = load_codec(manifest.encoding), open_checkpoint(reference)
    stored, _ = read_header(Path(message) / FILE)
    _check_layout(stored, codec, old, message)
    update = manifest.kind == "update"
    kinds = {
        name: ("F32" if update and entry.dtype in ("F16", "BF16") else entry.dtype)
        for name, entry in old.tensors.items()
    }
    with new_directory(out) as directory:
        layout = layout_like(old, kinds)
        with StepNorms(old) as steps, TensorWriter(directory, layout, old.metadata, hashed=True) as writer:
            for name, entry in sorted(old.tensors.items()):
                if entry.dtype not in FLOATS:
                    for offset, content in raw(stored.get(f"{name}::raw", entry)):
                        writer.write(name, offset, content)
                else:
                    decoded = _decoded(codec, entry, name, stored, message)
                    _write_floats(writer, name, kinds[name], decoded, steps if norms else None)
            digests = writer.digests()
        copy_companions(Path(message), directory, leave=(NORMS,))
        if norms:
            steps.write(directory)
        return _describe(directory, manifest, old, message, digests)


def _write_floats(
    writer: TensorWriter, name: str, kind: str, parts_of_it: Iterator[tuple[Array, Array]], steps: StepNorms | None
) -> None:
    """Write a tensor's values (the reference as stored, what it becomes) part by part, rounded to its dtype."""
    offset = start = 0
    for old, values in parts_of_it:
        block = values
        if values.dtype != STORAGE[kind]:
            block = np.empty(len(values), STORAGE[kind])
            narrow(values, kind, block, np.empty(len(values), np.uint32))
        if steps is not None:
            steps.take(name, kind, start, block, old)
        writer.write(name, offset, as_bytes(block))
        offset, start = offset + block.nbytes, start + len(values)


def _describe(
    directory: Path, manifest: Manifest, old: Checkpoint, message: Path, digests: Mapping[str, str]
) -> Manifest:
    """Write the manifest of the decoded directory. Raises `CheckpointError` where its sender has another result."""
    extra = {key: value for key, value in manifest.extra.items() if key not in ("reference_sha256", "decoded_sha256")}
    travelled = sum(entry.size for entry in manifest.files.values())
    made = write_manifest(
        directory,
        dataclasses.replace(
            manifest,
            encoding=FULL,
            dtypes=open_checkpoint(directory).dtypes(),
            parameters=old.parameters,
            files={},
            extra=extra | {DECODED: manifest.encoding, "message_bytes": travelled},
        ),
        digests,
    )
    wanted = manifest.extra.get("decoded_sha256")
    if wanted is not None and wanted != made.content_sha256:
        raise CheckpointError(
            f"{message} decodes to a model with sha256 {made.content_sha256:.12}, "
            f"its sender has {str(wanted):.12}: send it in full (encoding: full)"
        )
    return made


def _check_layout(stored: dict[str, TensorEntry], codec: Codec, old: Checkpoint, message: Path) -> None:
    """Every stored tensor must be one that the codec writes for a tensor of the reference, in the right size."""
    left = set(stored)
    for name, entry in old.tensors.items():
        if entry.dtype not in FLOATS:
            expected = {"raw": (entry.dtype, entry.shape)}
        else:
            selected = stored.get(f"{name}::{codec.selection.field}") if codec.selection is not None else None
            length_of_it = selected.elements if selected is not None else 0
            fields = codec.fields(entry.elements, length_of_it)
            expected = {suffix: (dtype, (length,)) for suffix, dtype, length in fields}
        present = [suffix for suffix in expected if f"{name}::{suffix}" in stored]
        if present and len(present) < len(expected):
            raise CheckpointError(f"{message}: tensor {name!r} has {present}, expected {list(expected)}")
        for suffix in present:
            found = stored[f"{name}::{suffix}"]
            if (found.dtype, found.shape) != expected[suffix]:
                raise CheckpointError(
                    f"{message}: {found.name!r} is {found.dtype} {list(found.shape)}, expected "
                    f"{expected[suffix][0]} {list(expected[suffix][1])}"
                )
            left.discard(found.name)
    if left:
        raise CheckpointError(f"{message}: {sorted(left)[:3]} belong to no tensor of the reference")


def _decoded(
    codec: Codec, entry: TensorEntry, name: str, stored: dict[str, TensorEntry], message: Path
) -> Iterator[tuple[Array, Array]]:
    """Values of one tensor, part by part: the reference as stored, and the reference plus the difference."""
    fields = {suffix: stored.get(f"{name}::{suffix}") for suffix, _, _ in codec.fields(0, 0)}
    places = dict.fromkeys(fields, 0)
    with open(Path(message) / FILE, "rb", buffering=0) as file:

        def take(suffix: str, length: int) -> Array:
            found = fields[suffix]
            assert found is not None
            array = np.empty(length, INTEGERS.get(found.dtype) or STORAGE[found.dtype])
            if places[suffix] + array.nbytes > found.size:
                raise CheckpointError(f"{message}: {found.name!r} is too short")
            read_exactly(file.fileno(), as_bytes(array), found.start + places[suffix], found.file)
            places[suffix] += array.nbytes
            return array

        for _, (old,) in parts([entry]):
            values = np.empty(len(old), np.float64 if entry.dtype == "F64" else np.float32)
            widen(old, entry.dtype, values)
            if next(iter(fields.values())) is not None:
                count = len(old)
                arrays = {suffix: take(suffix, length) for suffix, _, length in codec.fields(count, 0)}
                try:
                    if (selection := codec.selection) is not None:
                        arrays[selection.field] = take(selection.field, selection.stored_length(arrays, count))
                    np.add(values, codec.decode(arrays, count), out=values)
                except ValueError as error:
                    raise CheckpointError(f"{message}: tensor {name!r} is malformed: {error}") from None
            yield old, values
        for suffix, found in fields.items():
            if found is not None and places[suffix] != found.size:
                raise CheckpointError(f"{message}: {found.name!r} is too long")
