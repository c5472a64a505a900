"""From a checkpoint on disk to the shard that a rank holds, reading only the bytes of that shard."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from facility.exchange.checkpoints.checkpoint import Checkpoint, TensorEntry, expect, read_exactly, torch_dtype
from facility.exchange.checkpoints.conversion import Conversion, Pieces, describe_missing
from facility.exchange.errors import CheckpointError
from facility.exchange.files.streamed_digest import StreamedDigest

PIECE_BYTES = 64_000_000
"""Bytes read at once: what loading needs beyond the shard itself."""


@dataclass(frozen=True, kw_only=True)
class LocalShard:
    """The rows of one parameter that this rank holds; what is loaded, trained, clipped, synchronised and saved."""

    name: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    first: int
    """First row held here."""
    tensor: torch.Tensor
    """The rows, sharing memory with the parameter."""
    parameter: nn.Parameter
    copy: bool = False
    """Another rank holds the original (a tied head away from its embedding): not saved, not counted in the norm."""

    @property
    def trained(self) -> bool:
        return self.parameter.requires_grad

    @property
    def gradient(self) -> torch.Tensor | None:
        """The rows of the gradient, sharing memory with it; None before backward."""
        gradient = self.parameter.grad
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    @contextmanager
    def filling(self) -> Iterator[LocalShard]:
        """Where its values are loaded to: here."""
        yield self


class Loadable(Protocol):
    """What is loaded from a tensor of the checkpoint."""

    @property
    def name(self) -> str:
        """In the checkpoint."""

    def filling(self) -> AbstractContextManager[LocalShard]:
        """Memory to fill; the values are taken over at the end of the block."""


def shard_of(name: str, parameter: nn.Parameter) -> LocalShard:
    """What this rank holds of a parameter, sharded by FSDP2 or not."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return LocalShard(name=name, shape=shape, first=0, tensor=parameter, parameter=parameter)
    first, count = 0, shape[0]
    coordinates = parameter.device_mesh.get_coordinate() or ()
    for size, index, placement in zip(parameter.device_mesh.shape, coordinates, parameter.placements, strict=True):
        if isinstance(placement, Shard):
            assert placement.dim == 0, "FSDP2 shards rows"
            length = -(-count // size)
            start = min(count, index * length)
            first, count = first + start, min(length, count - start)
    held: torch.Tensor = parameter.to_local().detach()
    assert tuple(held.shape) == (count, *shape[1:]), (name, held.shape, count, shape)
    return LocalShard(name=name, shape=shape, first=first, tensor=held, parameter=parameter)


Hashed = Mapping[Path, StreamedDigest]
"""Files whose sha256 is made of what is read of them."""


def read_rows(entry: TensorEntry, first: int, target: torch.Tensor, hashed: Hashed | None = None) -> None:
    """Fill `target` (rows `first`, `first` + 1, ... of the stored tensor), converting the dtype."""
    row = (entry.elements // entry.shape[0]) if entry.shape and entry.shape[0] else 1
    read_elements(entry, first * row, target.detach().view(-1), hashed)


def read_elements(entry: TensorEntry, start: int, flat: torch.Tensor, hashed: Hashed | None = None) -> None:
    """Fill `flat` with the stored tensor's elements from `start` on, in pieces, converting the dtype."""
    if flat.numel() == 0:
        return
    stored = torch_dtype(entry.dtype)
    begin = entry.start + start * stored.itemsize
    per_piece = max(1, PIECE_BYTES // stored.itemsize)
    digest = (hashed or {}).get(entry.file)
    descriptor = os.open(entry.file, os.O_RDONLY)
    try:
        for at in range(0, flat.numel(), per_piece):
            count = min(per_piece, flat.numel() - at)
            buffer = bytearray(count * stored.itemsize)
            read_exactly(descriptor, memoryview(buffer), begin + at * stored.itemsize, entry.file)
            if digest is not None:
                digest.feed(begin + at * stored.itemsize, memoryview(buffer))
            flat[at : at + count].copy_(torch.frombuffer(buffer, dtype=stored))
    finally:
        os.close(descriptor)


def initialise_parameters(model: nn.Module, device: torch.device) -> None:
    """Give memory to parameters built on the meta device; buffers (rotary tables) keep their values."""
    shared: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                shared.setdefault(id(parameter), []).append((module, name))
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for places in shared.values():  # `_apply` replaces a tied parameter once for each of its names
        first = places[0][0]._parameters[places[0][1]]
        for module, name in places[1:]:
            module._parameters[name] = first


def read_pieces(
    pieces: Pieces,
    checkpoint: Checkpoint,
    part: LocalShard,
    target: torch.Tensor,
    hashed: Hashed | None = None,
    *,
    absent: bool = False,
) -> None:
    """Fill `target` (the rows of a part) from the stored tensors that the parameter is made of.

    `absent`: leave the elements as they are whose tensor the checkpoint lacks.
    """
    row = torch.Size(part.shape[1:]).numel()
    begin = part.first * row
    flat = target.detach().view(-1)
    for run in pieces.between(begin, begin + flat.numel()):
        if absent and run.tensor not in checkpoint.tensors:
            continue
        into = flat[run.at - begin : run.at - begin + run.count]
        read_elements(checkpoint.tensors[run.tensor], run.start, into, hashed)


def load_shards(
    parts: Iterable[Loadable],
    checkpoint: Checkpoint,
    conversion: Conversion | None = None,
    *,
    hashed: Hashed | None = None,
) -> None:
    """Fill each part from the checkpoint's tensor of that name, or from those that it is made of.

    `hashed`: files of the checkpoint to hash as they are read; then parts are filled in the order in which they lie
    there. Raises `CheckpointError`.
    """
    pieces = conversion.pieces if conversion is not None else {}
    if hashed:
        expect(hashed, checkpoint.tensors.values())
        parts = sorted(parts, key=lambda part: _place(part, checkpoint, pieces))
    for one in parts:
        with one.filling() as part:
            _load_shard(part, checkpoint, pieces, hashed)


def _load_shard(part: LocalShard, checkpoint: Checkpoint, pieces: Mapping[str, Pieces], hashed: Hashed | None) -> None:
    if part.name in pieces:
        read_pieces(pieces[part.name], checkpoint, part, part.tensor, hashed)
        return
    entry = checkpoint.tensors.get(part.name)
    if entry is None:
        raise CheckpointError(describe_missing(checkpoint, [part.name]))
    if entry.shape != part.shape:
        raise CheckpointError(
            f"{checkpoint.directory}: tensor {part.name!r} has shape {list(entry.shape)}, "
            f"its config.json asks for {list(part.shape)}"
        )
    read_rows(entry, part.first, part.tensor, hashed)


def _place(part: Loadable, checkpoint: Checkpoint, pieces: Mapping[str, Pieces]) -> tuple[str, int]:
    """Where the first bytes of a part lie; one that the checkpoint lacks comes first, and is refused."""
    names = pieces[part.name].tensors if part.name in pieces else [part.name]
    found = [checkpoint.tensors[name] for name in names if name in checkpoint.tensors]
    return min(((str(entry.file), entry.start) for entry in found), default=("", 0))


def add_shards(
    parts: Iterable[LocalShard], checkpoint: Checkpoint, conversion: Conversion | None = None, share: float = 1.0
) -> None:
    """Add the checkpoint's tensors of these names, times `share`, to the parts; of those it lacks, nothing.

    Raises `CheckpointError` for another shape.
    """
    pieces = conversion.pieces if conversion is not None else {}
    for part in parts:
        made_of = pieces.get(part.name)
        entry = checkpoint.tensors.get(part.name)
        if made_of is not None:
            if not any(name in checkpoint.tensors for name in made_of.tensors):
                continue
        elif entry is None:
            continue
        elif entry.shape != part.shape:
            raise CheckpointError(
                f"{checkpoint.directory}: tensor {part.name!r} has shape {list(entry.shape)}, "
                f"the model's is {list(part.shape)}: remove the directory"
            )
        rows = torch.zeros_like(part.tensor)
        if made_of is not None:
            read_pieces(made_of, checkpoint, part, rows, absent=True)
        elif entry is not None:
            read_rows(entry, part.first, rows)
        with torch.no_grad():
            part.tensor.add_(rows, alpha=share)
