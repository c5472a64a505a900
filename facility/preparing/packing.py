"""Token streams to files of fixed-length blocks, with bounded memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy

from facility.preparing.encoding import EncodedBatch
from facility.preparing.sources import Document

HEADER = numpy.lib.format.write_array_header_1_0


class RowWriter:
    """Append rows to a `.npy` file; the header is corrected at the end (NumPy leaves room for the row count)."""

    def __init__(self, path: Path, width: int, dtype: str = "<i4", *, rows: int = 0) -> None:
        """`rows`: keep so many of a file that an earlier run wrote, and append to those."""
        self.path, self.width, self.dtype, self.rows = path, width, dtype, rows
        self._file: BinaryIO = open(path, "r+b" if rows else "wb")
        self._header()
        self._start = self._file.tell()
        self._file.truncate(self._start + rows * width * numpy.dtype(dtype).itemsize)
        self._file.seek(0, os.SEEK_END)

    def sync(self) -> None:
        """All appended rows are on disk when it returns."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def _header(self) -> None:
        HEADER(self._file, {"descr": self.dtype, "fortran_order": False, "shape": (self.rows, self.width)})

    def append(self, rows: numpy.ndarray) -> None:
        """Append an array whose size is a whole number of rows."""
        assert rows.size % self.width == 0
        self._file.write(numpy.ascontiguousarray(rows, dtype=self.dtype).tobytes())
        self.rows += rows.size // self.width

    def close(self) -> None:
        self._file.seek(0)
        self._header()
        assert self._file.tell() == self._start, "the header changed its length"
        self._file.close()


class Packer:
    """Concatenate documents and cut the stream into blocks; what fills no block yet is carried over to the next call.

    The result depends on the documents and their order only, not on how they were batched.
    """

    def __init__(self, path: Path, block_tokens: int, state: dict[str, Any] | None = None) -> None:
        """`state`: what an earlier run's `state()` returned."""
        state = state or {"rows": 0, "carried": [], "tokens": 0}
        self._writer = RowWriter(path, block_tokens, rows=state["rows"])
        self._carried = numpy.array(state["carried"], dtype=numpy.int32)
        self.tokens: int = state["tokens"]

    def state(self) -> dict[str, Any]:
        """What a later run goes on from; what it counts is on disk."""
        self._writer.sync()
        return {"rows": self._writer.rows, "carried": self._carried.tolist(), "tokens": self.tokens}

    @property
    def blocks(self) -> int:
        return self._writer.rows

    @property
    def tail_tokens(self) -> int:
        """Tokens that wait for a block to fill."""
        return len(self._carried)

    def append(self, encoded: EncodedBatch, documents: list[Document]) -> None:
        """Append the next documents' tokens."""
        stream = numpy.concatenate([self._carried, encoded.tokens])
        whole = len(stream) // self._writer.width * self._writer.width
        self._writer.append(stream[:whole])
        self._carried = stream[whole:]
        self.tokens += len(encoded.tokens)

    def close(self) -> None:
        self._writer.close()
