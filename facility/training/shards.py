"""From a checkpoint on disk to the shard that a rank holds, reading only the bytes of that shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from facility.exchange.checkpoints.checkpoint import Checkpoint, Opened, TensorEntry, expect_tensors, torch_dtype
from facility.exchange.checkpoints.conversion import Conversion, describe_missing
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
        """Name of the tensor in the checkpoint."""

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


class ShardReader:
    """Fills parts from the tensors of a checkpoint; its files stay open once they are needed. Use as a context manager.

    `hashed`: files of the checkpoint to hash as they are read.
    """

    def __init__(
        self, checkpoint: Checkpoint, conversion: Conversion | None = None, hashed: Hashed | None = None
    ) -> None:
        self.checkpoint, self.hashed = checkpoint, hashed or {}
        self.pieces = conversion.pieces if conversion is not None else {}
        self._opened = Opened()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.__exit__()

    def fill(self, part: LocalShard) -> None:
        """Read a part from the tensor of its name, or from those that it is made of. Raises `CheckpointError`."""
        if part.name in self.pieces:
            self._read_pieces(part)
            return
        entry = self.checkpoint.tensors.get(part.name)
        if entry is None:
            raise CheckpointError(describe_missing(self.checkpoint, [part.name]))
        if entry.shape != part.shape:
            raise CheckpointError(
                f"{self.checkpoint.directory}: tensor {part.name!r} has shape {list(entry.shape)}, "
                f"its config.json asks for {list(part.shape)}"
            )
        self._read_rows(entry, part)

    @torch.no_grad()
    def add(self, part: LocalShard, share: float) -> None:
        """Add to a part what is stored of it, times `share`; of what the checkpoint lacks, nothing.

        Raises `CheckpointError` for another shape.
        """
        stored = self._stored(part.name)
        if not stored:
            return
        rows = dataclasses.replace(part, tensor=torch.zeros_like(part.tensor))
        if part.name in self.pieces:
            self._read_pieces(rows, absent=True)
        elif stored[0].shape == part.shape:
            self._read_rows(stored[0], rows)
        else:
            raise CheckpointError(
                f"{self.checkpoint.directory}: tensor {part.name!r} has shape {list(stored[0].shape)}, "
                f"the model's is {list(part.shape)}: remove the directory"
            )
        part.tensor.add_(rows.tensor, alpha=share)

    def place(self, part: Loadable) -> tuple[str, int]:
        """Where the first bytes of a part lie; one that the checkpoint lacks comes first, and is refused."""
        return min(((str(entry.file), entry.start) for entry in self._stored(part.name)), default=("", 0))

    def _stored(self, name: str) -> list[TensorEntry]:
        """The tensors that a part of this name is read from, those that the checkpoint holds."""
        names = self.pieces[name].tensors if name in self.pieces else [name]
        return [self.checkpoint.tensors[one] for one in names if one in self.checkpoint.tensors]

    def _read_rows(self, entry: TensorEntry, part: LocalShard) -> None:
        row = (entry.elements // entry.shape[0]) if entry.shape and entry.shape[0] else 1
        self._read(entry, part.first * row, part.tensor.detach().view(-1))

    def _read_pieces(self, part: LocalShard, *, absent: bool = False) -> None:
        """Fill a part from the stored tensors that the parameter is made of.

        `absent`: leave the elements as they are whose tensor the checkpoint lacks.
        """
        begin = part.first * torch.Size(part.shape[1:]).numel()
        flat = part.tensor.detach().view(-1)
        for run in self.pieces[part.name].between(begin, begin + flat.numel()):
            if absent and run.tensor not in self.checkpoint.tensors:
                continue
            into = flat[run.at - begin : run.at - begin + run.count]
            self._read(self.checkpoint.tensors[run.tensor], run.start, into)

    def _read(self, entry: TensorEntry, start: int, flat: torch.Tensor) -> None:
        """Fill `flat` with the stored tensor's elements from `start` on, in pieces, converting the dtype."""
        stored = torch_dtype(entry.dtype)
        per_piece = max(1, PIECE_BYTES // stored.itemsize)
        for at in range(0, flat.numel(), per_piece):
            count, offset = min(per_piece, flat.numel() - at), (start + at) * stored.itemsize
            buffer = bytearray(count * stored.itemsize)
            self._opened(entry, offset, memoryview(buffer))
            if entry.file in self.hashed:
                self.hashed[entry.file].feed(entry.start + offset, memoryview(buffer))
            flat[at : at + count].copy_(torch.frombuffer(buffer, dtype=stored))


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
    with ShardReader(checkpoint, conversion, hashed) as reader:
        if hashed:
            expect_tensors(hashed, checkpoint.tensors.values())
            parts = sorted(parts, key=reader.place)
        for one in parts:
            with one.filling() as part:
                reader.fill(part)


def add_shards(
    parts: Iterable[LocalShard], checkpoint: Checkpoint, conversion: Conversion | None, share: float
) -> None:
    """Add the checkpoint's tensors of these names, times `share`, to the parts; of those it lacks, nothing.

    Raises `CheckpointError` for another shape.
    """
    with ShardReader(checkpoint, conversion) as reader:
        for part in parts:
            reader.add(part, share)
