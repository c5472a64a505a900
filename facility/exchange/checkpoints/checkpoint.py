"""Reading and writing Hugging Face checkpoints as directories of safetensors shards.

The header is parsed here, not by a library that maps the file, so that a reader can stream any byte range of any
tensor with bounded memory, and so that a hostile header is refused before anything is allocated for it.

Format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON header, tensor bytes).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from facility.exchange.errors import CheckpointError
from facility.exchange.files.durable import as_umask_allows, write_json
from facility.exchange.files.streamed_digest import StreamedDigest
from facility.exchange.json_text import no_duplicates, parse_values

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
"""What peft calls the file of an adapter."""
MAX_HEADER_BYTES = 100_000_000
MOST_TENSORS = 300_000
"""Twice as many as any published model has."""
MOST_VALUES = 10 * MOST_TENSORS
"""Lists, mappings and commas in one header or index, counted before it is parsed: memory follows them, not bytes."""
MAX_NAME = 500
"""Characters of a tensor's name."""
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
FLOATS = ("F64", "F32", "F16", "BF16")
STORED_AS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""safetensors name by the dtype of a setting."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where one tensor's bytes lie."""

    name: str
    file: Path
    dtype: str
    """safetensors name: F32, BF16, F16, I64, ..."""
    shape: tuple[int, ...]
    start: int
    """Byte offset of the first element from the beginning of the file."""
    size: int
    """Bytes."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The tensors of a checkpoint directory, by name; opening one reads headers only."""

    directory: Path
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]

    @property
    def parameters(self) -> int:
        return sum(entry.elements for entry in self.tensors.values())

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry in self.tensors.values())

    def dtypes(self) -> dict[str, int]:
        """Number of tensors per dtype."""
        counts: dict[str, int] = {}
        for entry in self.tensors.values():
            counts[entry.dtype] = counts.get(entry.dtype, 0) + 1
        return dict(sorted(counts.items()))

    def read(self, name: str) -> torch.Tensor:
        """One tensor, whole, in its stored dtype."""
        import torch

        entry = self.tensors[name]
        buffer = bytearray(entry.size)
        read_tensor(entry, memoryview(buffer))
        if not entry.size:
            return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
        return torch.frombuffer(buffer, dtype=torch_dtype(entry.dtype)).reshape(entry.shape)


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of a safetensors name such as `BF16`. Raises `CheckpointError` for one that is not supported."""
    import torch

    table = {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }
    if name not in table:
        raise CheckpointError(f"dtype {name} is not supported; supported are {sorted(table)}")
    return table[name]


class EndsEarly(CheckpointError):
    """A file became shorter after it was opened."""

    def __init__(self, file: Path, end: int, lacks: int) -> None:
        """`end`: where it ends, bytes; `lacks`: bytes that were expected there."""
        self.file = Path(file)
        super().__init__(f"{file} ends at byte {end}, expected {lacks} bytes more: truncated")


def read_exactly(descriptor: int, buffer: memoryview, offset: int, file: Path) -> None:
    """Fill `buffer` from byte `offset`. Raises `EndsEarly`."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            raise EndsEarly(file, offset + done, len(buffer) - done)
        done += count


def read_tensor(entry: TensorEntry, buffer: memoryview, offset: int = 0) -> None:
    """Fill `buffer` with a tensor's stored bytes from its byte `offset` on. Raises `CheckpointError`."""
    with open(entry.file, "rb", buffering=0) as file:
        read_exactly(file.fileno(), buffer, entry.start + offset, entry.file)


class Opened:
    """Reads as `read_tensor`, from files that stay open once they are needed. Use as a context manager."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def __call__(self, entry: TensorEntry, offset: int, buffer: memoryview) -> None:
        if entry.file not in self._descriptors:
            self._descriptors[entry.file] = os.open(entry.file, os.O_RDONLY)
        read_exactly(self._descriptors[entry.file], buffer, entry.start + offset, entry.file)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}


def expect_tensors(hashed: Mapping[Path, StreamedDigest], entries: Iterable[TensorEntry]) -> None:
    """Announce to the files' digests which bytes will be read: those of the tensors, and no others."""
    ranges: dict[Path, list[tuple[int, int]]] = {}
    for entry in entries:
        ranges.setdefault(entry.file, []).append((entry.start, entry.start + entry.size))
    for file, found in ranges.items():
        if file in hashed:
            hashed[file].expect(found)


def in_file_order(checkpoint: Checkpoint, tensors: Mapping[str, TensorEntry] | None = None) -> list[TensorEntry]:
    """The tensors of a checkpoint, or those of the same names in `tensors`, in the order of its bytes on disk."""
    ordered = sorted(checkpoint.tensors.values(), key=lambda entry: (entry.file.name, entry.start, entry.name))
    return [(tensors or checkpoint.tensors)[entry.name] for entry in ordered]


def read_header(file: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Parse one safetensors header; every offset is checked against the file's size before it is believed."""
    file = Path(file)
    try:
        if not file.is_file():
            raise CheckpointError(f"{file} is not a regular file")
        size = file.stat().st_size
        with open(file, "rb", buffering=0) as handle:
            prefix = handle.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{file} has {size} bytes, too short for a safetensors header")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{file} claims a header of {length} bytes, but the file has {size}")
            raw = handle.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    try:
        header = _parsed(raw)
    except ValueError as error:
        raise CheckpointError(f"{file} has a header that is not valid JSON: {str(error):.200}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a header that is not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{file} has __metadata__ that is not an object of strings")
    begin = 8 + length
    entries = {name: _entry(file, name, value, begin, size) for name, value in header.items()}
    position = begin
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.size)):
        if entry.start != position:
            what = "overlap" if entry.start < position else "leave a gap"
            raise CheckpointError(
                f"{file}: the bytes of tensor {entry.name!r} {what} at offset {entry.start}, expected {position}"
            )
        position = entry.start + entry.size
    if position != size:
        raise CheckpointError(f"{file} has {size} bytes, its header accounts for {position}")
    return entries, metadata


def _parsed(raw: bytes) -> Any:
    if (values := raw.count(b"{") + raw.count(b"[") + raw.count(b",")) > MOST_VALUES:
        raise ValueError(f"it holds some {values} values, expected at most {MOST_VALUES}")
    return parse_values(raw.decode(), object_pairs_hook=no_duplicates)  # of bytes, json would take UTF-16 as well


def _entry(file: Path, name: str, value: Any, begin: int, size: int) -> TensorEntry:
    if len(name) > MAX_NAME or not name.isprintable():
        raise CheckpointError(
            f"{file}: a tensor has the name {name!r:.80}; expected at most {MAX_NAME} printable characters"
        )
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{file}: tensor {name!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{file}: tensor {name!r} has dtype {dtype!r}; known are {sorted(ITEM_BYTES)}")

    def whole(numbers: Any) -> bool:
        return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 2**63 for n in numbers)

    if not whole(shape) or not whole(offsets) or len(offsets) != 2 or len(shape) > 16:
        raise CheckpointError(
            f"{file}: tensor {name!r} has shape {shape!r:.80} and offsets {offsets!r:.80}; "
            "expected lists of whole numbers"
        )
    start, end = offsets
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if not start <= end or begin + end > size or end - start != expected:
        raise CheckpointError(
            f"{file}: tensor {name!r} of {expected} bytes has offsets {start}..{end} in a file of {size} bytes"
        )
    return TensorEntry(name=name, file=file, dtype=dtype, shape=tuple(shape), start=begin + start, size=expected)


def shards_of(directory: Path) -> tuple[dict[str, str] | None, list[str]]:
    """The file of each tensor as a checkpoint's index has it, None without one, and the names of its files.

    Raises `CheckpointError` for an index that is malformed or names a file outside the directory.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory: expected a Hugging Face checkpoint")
    if (directory / INDEX).exists():
        try:
            if not (directory / INDEX).is_file():  # a named pipe would block, a device never end
                raise CheckpointError(f"{directory / INDEX} is not a regular file")
            if (directory / INDEX).stat().st_size > MAX_HEADER_BYTES:
                raise CheckpointError(f"{directory / INDEX} is larger than {MAX_HEADER_BYTES} bytes")
            weight_map = _parsed((directory / INDEX).read_bytes())["weight_map"]
            names = sorted(set(weight_map.values()))
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{directory / INDEX} is malformed: {error!r}") from None
    elif single := next((name for name in (SINGLE, ADAPTER) if (directory / name).exists()), None):
        weight_map, names = None, [single]
    else:
        raise CheckpointError(
            f"{directory} holds neither {SINGLE} nor {INDEX}; "
            "CrossFed reads safetensors only (convert .bin files first)"
        )
    if not names:
        raise CheckpointError(f"{directory / INDEX} names no shard")
    for name in names:
        if not isinstance(name, str) or "/" in name or not name.isprintable() or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{directory / INDEX} names the shard {name!r:.80}; expected a plain *.safetensors file name"
            )
    return weight_map, names


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open `model.safetensors`, the shards that `model.safetensors.index.json` names, or an adapter of peft's.

    Raises `CheckpointError` for missing shards, names outside the directory, tensors in the wrong shard or twice.
    """
    directory = Path(directory)
    weight_map, names = shards_of(directory)
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    for name in names:
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory / name} is missing: the checkpoint is incomplete")
        entries, extra = read_header(directory / name)
        metadata.update(extra)
        if len(tensors) + len(entries) > MOST_TENSORS:
            raise CheckpointError(f"{directory} holds more than {MOST_TENSORS} tensors")
        for key, entry in entries.items():
            if key in tensors:
                raise CheckpointError(f"tensor {key!r} is in {tensors[key].file.name} and again in {name}")
            if weight_map is not None and weight_map.get(key) != name:
                raise CheckpointError(f"tensor {key!r} is in {name}, but the index says {weight_map.get(key)!r}")
            tensors[key] = entry
    if weight_map is not None and (missing := sorted(set(weight_map) - set(tensors))):
        raise CheckpointError(f"{directory}: tensors {missing[:5]} are in the index but in no shard")
    return Checkpoint(directory=directory, tensors=tensors, metadata=metadata)


def save_tensors(
    directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, shard_bytes: int = 2_000_000_000
) -> None:
    """Write `(name, tensor)` pairs as Hugging Face shards plus index, holding one shard in memory at a time.

    Names of shards need their total, so they are written under temporary names and renamed; call inside
    `durable.new_directory`.
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    pending: dict[str, torch.Tensor] = {}
    shards: list[tuple[Path, list[str]]] = []
    filled = total = 0

    def flush() -> None:
        nonlocal pending, filled
        path = directory / f"shard-{len(shards):05d}.part"
        save_file(pending, path, metadata={"format": "pt"})
        os.chmod(path, as_umask_allows(0o644))  # safetensors writes 0600 whatever the umask
        shards.append((path, list(pending)))
        pending, filled = {}, 0

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if pending and filled + size > shard_bytes:
            flush()
        pending[name] = tensor.detach().contiguous()
        filled += size
        total += size
    flush()
    if len(shards) == 1:
        os.rename(shards[0][0], directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, start=1):
        final = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        os.rename(path, directory / final)
        weight_map.update(dict.fromkeys(names, final))
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
