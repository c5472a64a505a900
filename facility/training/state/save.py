"""From the shards that ranks hold to a Hugging Face checkpoint, without gathering anything anywhere.

A safetensors file is a header and the tensors' bytes, row after row. Names, shapes and dtypes are known in advance,
so the first rank writes the headers and every rank then writes the rows it holds at their final offset. No rank
sends a weight to another; memory needed beyond the shard is one piece of `PIECE_BYTES`. The directory must be seen
by all ranks, as it must be for a checkpoint of several ranks in any case.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from facility.exchange.checkpoints.checkpoint import FLOATS, ITEM_BYTES, SINGLE, torch_dtype
from facility.exchange.checkpoints.conversion import Conversion, Pieces, Run
from facility.exchange.checkpoints.floats import STORAGE
from facility.exchange.checkpoints.step_norms import StepNorms
from facility.exchange.checkpoints.writer import Planned, header_of, layout_of_shards, write_index
from facility.exchange.errors import CheckpointError
from facility.exchange.files.checksum import Digest
from facility.exchange.files.durable import as_umask_allows
from facility.exchange.files.storage import name_in_errors
from facility.exchange.files.streamed_digest import StreamedDigest
from facility.training.shards import PIECE_BYTES, LocalShard

FILE_BYTES = 2_000_000_000
"""Largest file of an export, unless one tensor alone is larger."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where a tensor's bytes go."""

    file: str
    start: int
    """Byte offset of its first element."""
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return ITEM_BYTES[self.dtype] * torch.Size(self.shape).numel()


def plan_files(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], *, single: str = SINGLE
) -> tuple[dict[str, Slot], dict[str, bytes]]:
    """Lay `(name, dtype, shape)` out in files: the slot of each tensor and the header of each file.

    `single`: name of the file where one is enough. Pure: every rank computes the same plan.
    """
    planned = [Planned(name=name, dtype=dtype, shape=shape) for name, dtype, shape in tensors]
    slots: dict[str, Slot] = {}
    headers: dict[str, bytes] = {}
    files = layout_of_shards(planned, FILE_BYTES)
    for file, group in files.items():
        file = single if len(files) == 1 else file
        headers[file], starts, _ = header_of(group, {"format": "pt"})
        for one in group:
            slots[one.name] = Slot(file=file, start=starts[one.name], dtype=one.dtype, shape=one.shape)
    return slots, headers


def create_files(
    directory: Path,
    slots: dict[str, Slot],
    headers: dict[str, bytes],
    digest: Callable[[], Digest] = hashlib.sha256,
) -> dict[str, StreamedDigest]:
    """Write headers and index, and give every file its final size. One rank does this before all write rows.

    Returns what makes the files' digests of what `write_shards` writes, where one rank writes everything.
    """
    hashed: dict[str, StreamedDigest] = {}
    ends = dict.fromkeys(headers, 0)
    for slot in slots.values():
        ends[slot.file] = max(ends[slot.file], slot.start + slot.size)
    for file, header in headers.items():
        whole = max(ends[file], len(header))
        with name_in_errors(directory / file, needed=whole), open(directory / file, "wb") as handle:
            handle.write(header)
            handle.truncate(whole)
        hashed[file] = StreamedDigest(directory / file, whole, digest)
        hashed[file].feed(0, header)
        os.chmod(directory / file, as_umask_allows(0o644))
    layout: dict[str, list[Planned]] = {file: [] for file in headers}
    for name, slot in slots.items():
        layout[slot.file].append(Planned(name=name, dtype=slot.dtype, shape=slot.shape))
    write_index(directory, layout)
    return hashed


def write_shards(
    directory: Path,
    slots: dict[str, Slot],
    parts: Iterable[LocalShard],
    conversion: Conversion | None = None,
    *,
    hashed: Mapping[str, StreamedDigest] | None = None,
    norms: StepNorms | None = None,
) -> dict[str, str]:
    """Write the rows this rank holds of each tensor. Raises `CheckpointError` where fp16 cannot hold a weight.

    `hashed`: of `create_files`, where no other rank writes; then tensors are written in the order in which they lie,
    and the digest of each file is returned. `norms`: takes what is written.
    """
    pieces = conversion.pieces if conversion is not None else {}
    if hashed:

        def place(part: LocalShard) -> tuple[str, int]:
            names = pieces[part.name].tensors if part.name in pieces else [part.name]
            return min((slots[name].file, slots[name].start) for name in names)

        parts = sorted(parts, key=place)
    opened: dict[str, int] = {}
    try:
        for part in parts:
            for run, elements in _runs(part, slots, pieces):
                slot = slots[run.tensor]
                if slot.file not in opened:
                    opened[slot.file] = os.open(directory / slot.file, os.O_WRONLY)
                digest = hashed[slot.file] if hashed else None
                for start, piece in _pieces(elements, run.start, part.name, torch_dtype(slot.dtype)):
                    content = memoryview(piece.view(torch.uint8).numpy().data)
                    with name_in_errors(directory / slot.file, needed=os.fstat(opened[slot.file]).st_size):
                        _write(opened[slot.file], slot.start + start * piece.element_size(), content, digest)
                    if norms is not None and slot.dtype in FLOATS:
                        norms.take(run.tensor, slot.dtype, start, np.frombuffer(content, STORAGE[slot.dtype]))
        for file, descriptor in opened.items():
            with name_in_errors(directory / file):
                os.fsync(descriptor)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
    return {file: digest.finish() for file, digest in (hashed or {}).items()}


def _runs(
    part: LocalShard, slots: Mapping[str, Slot], pieces: Mapping[str, Pieces]
) -> Iterator[tuple[Run, torch.Tensor]]:
    """Where the elements of a shard lie in the checkpoint's tensors, and these elements."""
    row = torch.Size(part.shape[1:]).numel() if part.shape else 1
    begin, flat = part.first * row, part.tensor.reshape(-1)
    if part.name in pieces:
        runs = list(pieces[part.name].between(begin, begin + flat.numel()))
    else:
        assert part.shape == slots[part.name].shape, (part.name, part.shape, slots[part.name].shape)
        runs = [Run(at=begin, tensor=part.name, start=begin, count=flat.numel())]
    for run in runs:
        yield run, flat[run.at - begin : run.at - begin + run.count]


def _pieces(flat: torch.Tensor, start: int, name: str, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Elements of a tensor from `start` on, rounded to its dtype, each piece with its place."""
    for begin in range(0, flat.numel(), PIECE_BYTES // 4):
        piece = round_to_export(name, flat[begin : begin + PIECE_BYTES // 4], dtype)
        yield start + begin, piece.cpu().contiguous()


def round_to_export(name: str, piece: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to the export dtype; a finite weight that becomes infinite is an error naming the tensor."""
    result = piece.to(dtype)
    if dtype.is_floating_point and not all_finite(result):
        finite = piece[torch.isfinite(piece)]
        if finite.numel() < piece.numel():
            raise CheckpointError(f"tensor {name!r} holds weights that are not finite: training diverged")
        raise CheckpointError(
            f"tensor {name!r} holds {finite.abs().max().item():.6g}, beyond {dtype}'s largest "
            f"{torch.finfo(dtype).max:g}; export in bfloat16 (training.export_dtype)"
        )
    return result


def all_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite. Any such makes the sum one, and a sum is made twenty times faster than each
    is asked; where it is too large for float32, each is asked."""
    return bool(torch.isfinite(values.sum(dtype=torch.float32))) or bool(torch.isfinite(values).all())


def _write(descriptor: int, offset: int, view: memoryview, digest: StreamedDigest | None) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
    if digest is not None:
        digest.feed(offset, view)
