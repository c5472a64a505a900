"""Decode a message of `facility.exchange.checkpoints.delta` into a full model; each field is checked before use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from facility.exchange.checkpoints.checkpoint import (
    Checkpoint,
    Opened,
    TensorEntry,
    expect_tensors,
    in_file_order,
    open_checkpoint,
)
from facility.exchange.checkpoints.companions import copy_companions
from facility.exchange.checkpoints.delta_parts import FILE, READ, as_bytes, raw_ranges, read_parts
from facility.exchange.checkpoints.encoded import EncodedTensor, Read, add_difference, open_message, stored_of
from facility.exchange.checkpoints.floats import STORAGE, narrow, widen
from facility.exchange.checkpoints.step_norms import NAME as NORMS
from facility.exchange.checkpoints.step_norms import StepNorms
from facility.exchange.checkpoints.writer import TensorWriter, layout_like
from facility.exchange.delta_codecs import FULL
from facility.exchange.errors import CheckpointError
from facility.exchange.files.durable import new_directory
from facility.exchange.files.streamed_digest import StreamedDigest
from facility.exchange.messages.manifest import (
    Manifest,
    bytes_of,
    check_digest,
    read_manifest,
    streamed_digest,
    verify_manifest,
    write_manifest,
)

DECODED = "decoded_from"
"""In `extra`: the encoding that a directory travelled in."""
TRAVELLED = "message_bytes"
"""In `extra`, of a directory that is not what came: the bytes that did."""


def decode_update(message: Path, *, reference: Path, out: Path, norms: bool = False) -> Manifest:
    """Turn a message back into a full directory at `out`, which must not exist; returns its manifest.

    `norms`: write step_norms.json beside it, of the values as they are decoded, which reads nothing more. The message
    is verified by the reading that decodes it.

    Raises `CheckpointError` when the message is altered or malformed, or when it was made from another reference.
    """
    message = Path(message)
    manifest = verify_manifest(message, later=(FILE,))
    try:
        old = open_checkpoint(reference)
        tensors = open_message(message, manifest, reference, read_manifest(reference)).tensors
        hashed = streamed_digest(message, manifest, FILE)
        kinds = {name: entry.dtype for name, entry in tensors.items()}
        with new_directory(out) as directory, StepNorms(old) as steps:
            with TensorWriter(directory, layout_like(old, kinds), old.metadata, hashed=True) as writer:
                _write(in_file_order(old, tensors), writer, hashed, steps if norms else None)
                digests = writer.digests()
            check_digest(message, manifest, FILE, hashed.finish())
            copy_companions(message, directory, leave=(NORMS,))
            if norms:
                steps.write(directory)
            return _describe(directory, manifest, old, message, digests)
    except CheckpointError:
        verify_manifest(message)  # whatever else is wrong with it may come from an alteration
        raise


def _write(tensors: list[TensorEntry], writer: TensorWriter, hashed: StreamedDigest, steps: StepNorms | None) -> None:
    """Write what the tensors of a message decode to; `hashed` takes what is read of the message."""
    expect_tensors({hashed.path: hashed}, [field for entry in tensors for field in stored_of(entry)])
    with Opened() as opened:

        def read(field: TensorEntry, offset: int, buffer: memoryview) -> None:
            opened(field, offset, buffer)
            hashed.feed(field.start + offset, buffer)

        for entry in tensors:
            if isinstance(entry, EncodedTensor):
                _write_floats(entry, writer, read, steps)
                continue
            for offset, content in raw_ranges(entry):
                writer.write(entry.name, offset, content)
                if entry.file == hashed.path:
                    hashed.feed(entry.start + offset, content)


def _write_floats(entry: EncodedTensor, writer: TensorWriter, read: Read, steps: StepNorms | None) -> None:
    """Write a tensor's values part by part, rounded to its dtype."""
    kind, reference = entry.dtype, entry.reference
    for start, (old,) in read_parts([reference], piece=READ):
        values = np.empty(len(old), np.float64 if reference.dtype == "F64" else np.float32)
        widen(old, reference.dtype, values)
        add_difference(entry, start, values, read)
        block = values
        if values.dtype != STORAGE[kind]:
            block = np.empty(len(values), STORAGE[kind])
            narrow(values, kind, block, np.empty(len(values), np.uint32))
        if steps is not None:
            steps.take(entry.name, kind, start, block, old)
        writer.write(entry.name, start * block.itemsize, as_bytes(block))


def _describe(
    directory: Path, manifest: Manifest, old: Checkpoint, message: Path, digests: Mapping[str, str]
) -> Manifest:
    """Write the manifest of the decoded directory. Raises `CheckpointError` where its sender has another result."""
    extra = {key: value for key, value in manifest.extra.items() if key not in ("reference_sha256", "decoded_sha256")}
    travelled = bytes_of(manifest)
    made = write_manifest(
        directory,
        dataclasses.replace(
            manifest,
            encoding=FULL,
            dtypes=open_checkpoint(directory).dtypes(),
            parameters=old.parameters,
            files={},
            extra=extra | {DECODED: manifest.encoding, TRAVELLED: travelled},
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
