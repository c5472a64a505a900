"""The lines of a text file, packed or not: all of them, or an error where the file was cut or holds something else."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from facility.dataset import DatasetError

PACKED = (".gz", ".bz2", ".xz", ".zst")
"""How a file of JSON lines or text may be compressed."""
READ_BYTES = 64 << 10
LONGEST_LINE = 1 << 30
"""Bytes: three times as many are held while one is parsed. A packed file of a few kB may hold any number."""


def lines_of(path: Path) -> Iterator[tuple[bytes, float]]:
    """Raw lines, each with the share of the file read (of a packed file). Raises `OSError`, `EOFError`, `zlib.error` or
    `LZMAError` where a packed file ends early or holds something else, and `DatasetError` where a line has no end."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        packed = path.suffix.lower() in PACKED
        if packed and not size:
            raise EOFError("found no byte, expected a packed file; it was cut off as it was written")
        with _unpacked(file, path.suffix.lower()) if packed else file as text:
            number, position = 0, 0
            while line := text.readline(LONGEST_LINE + 1):
                number, position = number + 1, file.tell() if packed else position + len(line)
                if len(line) > LONGEST_LINE:
                    raise DatasetError(f"{path}:{number}: found a line of more than {LONGEST_LINE:,} bytes; divide it")
                yield line, min(1.0, position / size)


def _unpacked(file: BinaryIO, suffix: str) -> IO[bytes]:
    """What a packed file holds, as it is read."""
    if suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
    if suffix == ".gz":
        return gzip.open(file)  # type: ignore[return-value]
    return io.BufferedReader(_Streams(file, bz2.BZ2Decompressor if suffix == ".bz2" else lzma.LZMADecompressor))


class _Streams(io.RawIOBase):
    """What the streams of a `.bz2` or `.xz` file hold, one after the other; zeros between and after them are padding.

    `bz2.open` and `lzma.open` end in silence where something else than a stream follows: the rest of the documents.
    """

    def __init__(self, file: BinaryIO, begin: Callable[[], Any]) -> None:
        self._file, self._begin, self._stream = file, begin, begin()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            packed = b""
            if self._stream.eof:
                packed = self._stream.unused_data.lstrip(b"\0")
                while not packed:
                    if not (read := self._file.read(READ_BYTES)):
                        return 0
                    packed = read.lstrip(b"\0")
                self._stream = self._begin()
            elif self._stream.needs_input and not (packed := self._file.read(READ_BYTES)):
                raise EOFError("it ends in the middle of a stream; it was cut off as it was written")
            data = self._stream.decompress(packed, len(buffer))
        buffer[: len(data)] = data
        return len(data)
