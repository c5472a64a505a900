"""Signatures of a facility's documents that it hands to another, so that nearly equal documents are trained on once.

One facility writes them (`--share-signatures`), the other leaves out what they match (`--drop-signatures`), both with
the same salt, which the coordinator does not have. A signature is a document's MinHash (`near_duplicates`) over
shingles hashed with that salt. A holder of file and salt can test whether a text that it has, or guesses, is nearly in
the other's corpus, and how many of its documents are alike; no text can be read from them. Without the salt the numbers
say how many documents there are, and which of them are alike.

FILE    safetensors: `signatures`, uint32 of shape (documents, 128); metadata: format, and a check of the salt
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

import numpy
from numpy.typing import NDArray

from facility.dataset import DatasetError
from facility.exchange.checkpoints.checkpoint import read_header
from facility.exchange.checkpoints.writer import Planned, header_of
from facility.exchange.errors import CheckpointError
from facility.exchange.files.bounded import read_bounded
from facility.exchange.files.durable import new_file
from facility.preparing.near_duplicates import NUMBERS

FORMAT = "crossfed signatures 1"
NAME = "signatures"
LEAST_SALT, MOST_SALT = 16, 4096
"""Bytes of a salt."""
ROW_BYTES = 4 * NUMBERS
PART_ROWS = 65536
"""Rows that are sorted at once, about: 32 MB, and once more in order."""
MOST_PARTS = 256
READ_ROWS = 4096
MOST_SALT_FILE = 2 * MOST_SALT
"""Bytes of a salt's file, with blanks around it."""


def read_salt(path: Path) -> bytes:
    """The key that a salt's file gives. Raises `DatasetError` for one that is too short to be secret, or no file."""
    try:
        salt = read_bounded(path, MOST_SALT_FILE).strip()
    except OSError as error:
        raise DatasetError(f"salt {path} cannot be read: {error}") from None
    if not LEAST_SALT <= len(salt) <= MOST_SALT:
        raise DatasetError(
            f"salt {path} holds {len(salt)} bytes, expected {LEAST_SALT} to {MOST_SALT}: make one by "
            "`openssl rand -hex 32` and give it to the other facility, not to the coordinator"
        )
    return hashlib.blake2b(salt, digest_size=32, person=b"crossfed salt").digest()


def check_of(key: bytes) -> str:
    """Distinguishes one salt from another without revealing it."""
    return hashlib.blake2b(b"check", digest_size=8, key=key).hexdigest()


def write_signatures(path: Path, blocks: Iterable[NDArray[numpy.uint32]], key: bytes) -> None:
    """Write the file atomically, sorted: the order of the documents is not part of it. `blocks`: of rows.

    Sorted in parts, of which one is in memory at a time.
    """
    with TemporaryFile(dir=path.parent) as gathered:
        for block in blocks:
            gathered.write(numpy.ascontiguousarray(block, dtype="<u4").tobytes())
        gathered.flush()
        rows = gathered.tell() // ROW_BYTES
        tensor = Planned(name=NAME, dtype="U32", shape=(rows, NUMBERS))
        header, _, _ = header_of([tensor], {"format": FORMAT, "salt": check_of(key)})
        with new_file(path, mode=0o600) as file:
            file.write(header)
            for part in sorted_parts(gathered, rows, path.parent):
                file.write(part.tobytes())


def sorted_parts(gathered: BinaryIO, rows: int, scratch: Path) -> Iterator[NDArray[numpy.uint32]]:
    """The rows of a file in order, part after part: each holds the rows whose first number lies between two bounds,
    which are drawn from the rows themselves."""
    count = min(MOST_PARTS, -(-rows // PART_ROWS))
    if count <= 1:
        yield in_order(read_rows(gathered, 0, rows))
        return
    sample = [read_rows(gathered, at, 1)[0, 0] for at in range(0, rows, max(1, rows // (64 * count)))]
    bounds = numpy.unique(numpy.quantile(numpy.array(sample), numpy.arange(1, count) / count).astype("<u4"))
    with ExitStack() as open_files:
        parts = [open_files.enter_context(TemporaryFile(dir=scratch)) for _ in range(len(bounds) + 1)]
        for at in range(0, rows, READ_ROWS):
            some = read_rows(gathered, at, min(READ_ROWS, rows - at))
            where = numpy.searchsorted(bounds, some[:, 0], side="right")
            for number in numpy.unique(where):
                parts[number].write(some[where == number].tobytes())
        for part in parts:
            part.flush()
            yield in_order(read_rows(part, 0, part.tell() // ROW_BYTES))
            part.close()


def read_rows(file: BinaryIO, first: int, count: int) -> NDArray[numpy.uint32]:
    """From the row numbered `first` on, in calls of a size that the system reads whole."""
    found = b"".join(
        os.pread(file.fileno(), min(READ_ROWS, first + count - at) * ROW_BYTES, at * ROW_BYTES)
        for at in range(first, first + count, READ_ROWS)
    )
    return numpy.frombuffer(found, dtype="<u4").reshape(-1, NUMBERS)


def in_order(rows: NDArray[numpy.uint32]) -> NDArray[numpy.uint32]:
    """The rows sorted by their first number, then by the next."""
    return rows[numpy.lexsort(rows.T[::-1])]


def read_signatures(path: Path, key: bytes) -> numpy.ndarray:
    """Another facility's signatures, one a row, mapped. Raises `DatasetError` for a file that is none, or of another
    salt."""
    try:
        tensors, metadata = read_header(path)
        if metadata.get("format") != FORMAT or [*tensors] != [NAME]:
            raise CheckpointError("it has another format")
        rows = tensors[NAME]
        if rows.dtype != "U32" or rows.shape[1:] != (NUMBERS,):
            raise CheckpointError(f"its signatures are {rows.dtype} of shape {rows.shape}")
    except CheckpointError as error:
        raise DatasetError(f"{path} is not a file of `prepare --share-signatures`: {error}") from None
    if metadata.get("salt") != check_of(key):
        raise DatasetError(f"{path} was made with another salt: nothing in it could match; agree on one salt")
    if not rows.size:
        return numpy.empty(rows.shape, dtype="<u4")
    return numpy.memmap(path, dtype="<u4", mode="r", offset=rows.start, shape=rows.shape)
