"""Write a checkpoint's tensors piece by piece, in any order, from any thread.

All headers are known before the first byte of a tensor, so every file is given its final size at once and pieces go
to their places with `pwrite`. Call inside `durable.new_directory`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from facility.exchange.checkpoints.checkpoint import ADAPTER, INDEX, ITEM_BYTES, SINGLE, Checkpoint
from facility.exchange.files.checksum import Digest
from facility.exchange.files.durable import write_json
from facility.exchange.files.storage import name_in_errors
from facility.exchange.files.streamed_digest import StreamedDigest


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One tensor to be written."""

    name: str
    dtype: str
    """safetensors name."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Layout = Mapping[str, Sequence[Planned]]
"""Tensors by file name; more than one file gets an index."""


def layout_like(checkpoint: Checkpoint, dtypes: Mapping[str, str]) -> Layout:
    """The tensors named in `dtypes`, in those dtypes, in the same files as in `checkpoint`; a single one, unless it is
    an adapter's, is called as Hugging Face calls it."""
    files: dict[str, list[Planned]] = {}
    for name, entry in checkpoint.tensors.items():
        if name in dtypes:
            files.setdefault(entry.file.name, []).append(Planned(name=name, dtype=dtypes[name], shape=entry.shape))
    if len(files) == 1 and ADAPTER not in files:
        files = {SINGLE: next(iter(files.values()))}
    return files


def layout_of_shards(tensors: Sequence[Planned], shard_bytes: int) -> Layout:
    """Tensors in their order, in as few shards of at most `shard_bytes` as that order allows (one tensor at least)."""
    shards: list[list[Planned]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def header_of(tensors: Sequence[Planned], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """The head of a safetensors file with the tensors in this order, the first byte of each, and the file's size."""
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    starts: dict[str, int] = {}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.size
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        starts[tensor.name], offset = offset, end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    begin = 8 + len(raw)
    return struct.pack("<Q", len(raw)) + raw, {name: begin + start for name, start in starts.items()}, begin + offset


def write_index(directory: Path, layout: Layout) -> None:
    """Write the index of a checkpoint of several files."""
    if len(layout) < 2:
        return
    weight_map = {tensor.name: file for file, tensors in layout.items() for tensor in tensors}
    total = sum(tensor.size for tensors in layout.values() for tensor in tensors)
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


class TensorWriter:
    """Open files of the final size; `write` fills them. Closing checks nothing: write every byte.

    `hashed`: the files' digests are made of what is written, for `digests`, by `digest` (sha256). `present`: files of
    the layout that lie there already; they get their places in the index, and are not written. `as_listed`: tensors lie
    in the file in the order of the layout, for a file that is written and read in that order only; else the widest
    dtype comes first.
    """

    def __init__(
        self,
        directory: Path,
        layout: Layout,
        metadata: Mapping[str, str] | None = None,
        *,
        hashed: bool = False,
        digest: Callable[[], Digest] = hashlib.sha256,
        present: Collection[str] = (),
        as_listed: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self.places: dict[str, tuple[int, int, Planned]] = {}
        self._descriptors: dict[int, Path] = {}
        self._sizes: dict[int, int] = {}
        self._hashed, self._digest, self._as_listed = hashed, digest, as_listed
        self._digests: dict[int, StreamedDigest] = {}
        metadata = {"format": "pt"} if metadata is None else dict(metadata)
        try:
            for file, tensors in layout.items():
                if file not in present:
                    self._create(file, tensors, metadata)
        except BaseException:
            self.close()
            raise
        write_index(self.directory, layout)

    def _create(self, file: str, tensors: Sequence[Planned], metadata: Mapping[str, str]) -> None:
        # Widest dtype first keeps every tensor aligned, as the reference implementation orders them.
        ordered = list(tensors)
        if not self._as_listed:
            ordered.sort(key=lambda t: (-ITEM_BYTES[t.dtype], t.name))
        header, starts, size = header_of(ordered, metadata)
        descriptor = os.open(self.directory / file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._descriptors[descriptor] = self.directory / file
        self._sizes[descriptor] = size
        self._write_exactly(descriptor, memoryview(header), 0)
        with name_in_errors(self.directory / file, needed=size):
            os.ftruncate(descriptor, size)
        if self._hashed:
            self._digests[descriptor] = StreamedDigest(self.directory / file, size, self._digest)
            self._digests[descriptor].feed(0, header)
        for tensor in ordered:
            self.places[tensor.name] = (descriptor, starts[tensor.name], tensor)

    def write(self, name: str, offset: int, content: memoryview) -> None:
        """Write bytes of tensor `name` from byte `offset` within it."""
        descriptor, start, tensor = self.places[name]
        assert offset + len(content) <= tensor.size, (name, offset, len(content))
        self._write_exactly(descriptor, content, start + offset)
        if self._hashed:
            self._digests[descriptor].feed(start + offset, content)

    def digests(self) -> dict[str, str]:
        """The digest of each file by its name, once every byte is written; nothing unless `hashed`."""
        return {digest.path.name: digest.finish() for digest in self._digests.values()}

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = {}

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_exactly(self, descriptor: int, content: memoryview, offset: int) -> None:
        """A full disk is reported with this file's name: several directories may be written side by side."""
        done = 0
        with name_in_errors(self._descriptors[descriptor], needed=self._sizes[descriptor]):
            while done < len(content):
                done += os.pwrite(descriptor, content[done:], offset + done)
