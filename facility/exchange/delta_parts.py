"""Reading tensors part by part, and what both directions of a message share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import ITEM_BYTES, TensorEntry, read_exactly
from .codecs import PART, int4, int8, sparse
from .floats import STORAGE, Array

FILE = "delta.safetensors"
READ = 16 * PART
"""Elements read at a time."""
CODECS: dict[str, Any] = {"delta-int8": int8, "delta-int4": int4, "sparse": sparse}


def parts(entries: list[TensorEntry]) -> Iterator[tuple[int, list[Array]]]:
    """The same PART of several tensors of one shape."""
    with ExitStack() as stack:
        files = [stack.enter_context(open(entry.file, "rb", buffering=0)) for entry in entries]
        buffers = [memoryview(bytearray(min(READ, entry.elements) * ITEM_BYTES[entry.dtype])) for entry in entries]
        for begin in range(0, entries[0].elements, READ):
            count = min(READ, entries[0].elements - begin)
            arrays = []
            for file, entry, buffer in zip(files, entries, buffers, strict=True):
                item = ITEM_BYTES[entry.dtype]
                read_exactly(file.fileno(), buffer[: count * item], entry.start + begin * item, entry.file)
                arrays.append(np.frombuffer(buffer, STORAGE[entry.dtype], count))
            for start in range(0, count, PART):
                yield begin + start, [array[start : start + PART] for array in arrays]


def raw(entry: TensorEntry) -> Iterator[tuple[int, memoryview]]:
    with open(entry.file, "rb", buffering=0) as file:
        for offset in range(0, entry.size, 1 << 22):
            buffer = memoryview(bytearray(min(1 << 22, entry.size - offset)))
            read_exactly(file.fileno(), buffer, entry.start + offset, entry.file)
            yield offset, buffer


def as_bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B") if array.size else memoryview(b"")


def copy_companions(source: Path, target: Path) -> None:
    """Everything that is neither tensors, index nor manifest."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            if path.name != "manifest.json":
                shutil.copyfile(path, target / path.name)
