"""Signatures of a facility's documents that it hands to another, so that nearly equal documents are trained on once.

One facility writes them (`--share-signatures`), the other leaves out what they match (`--drop-signatures`), both with
the same salt, which the coordinator does not have. A signature is a document's MinHash (`near_duplicates`) over
shingles hashed with that salt. Who holds file and salt can test whether a text that it has, or guesses, is nearly in
the other's corpus, and how many of its documents are alike; it can read no text from them. Without the salt the numbers
say how many documents there are, and which of them are alike.

FILE    safetensors: `signatures`, uint32 of shape (documents, 128); metadata: format, and a check of the salt
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy

from facility.dataset import DatasetError
from facility.exchange.files.durable import write_bytes
from facility.preparing.near_duplicates import NUMBERS, Signature

FORMAT = "crossfed signatures 1"
LEAST_SALT, MOST_SALT = 16, 4096
"""Bytes of a salt."""
MOST_HEADER = 4096


def read_salt(path: Path) -> bytes:
    """The key that a salt's file gives. Raises `DatasetError` for one that is too short to be secret, or no file."""
    try:
        salt = path.read_bytes()[: MOST_SALT + 1].strip()
    except OSError as error:
        raise DatasetError(f"salt {path} cannot be read: {error}") from None
    if not LEAST_SALT <= len(salt) <= MOST_SALT:
        raise DatasetError(
            f"salt {path} holds {len(salt)} bytes, expected {LEAST_SALT} to {MOST_SALT}: make one by "
            "`openssl rand -hex 32` and give it to the other facility, not to the coordinator"
        )
    return hashlib.blake2b(salt, digest_size=32, person=b"crossfed salt").digest()


def check_of(key: bytes) -> str:
    """What tells one salt from another without telling the salt."""
    return hashlib.blake2b(b"check", digest_size=8, key=key).hexdigest()


def write_signatures(path: Path, signatures: Sequence[Signature], key: bytes) -> None:
    """Write the file atomically, sorted: the order of the documents is not part of it."""
    rows = numpy.array(signatures, dtype="<u4").reshape(-1, NUMBERS)
    rows = rows[numpy.lexsort(rows.T[::-1])]
    entry = {"dtype": "U32", "shape": list(rows.shape), "data_offsets": [0, rows.nbytes]}
    header = json.dumps({"__metadata__": {"format": FORMAT, "salt": check_of(key)}, "signatures": entry}).encode()
    header += b" " * (-len(header) % 8)
    write_bytes(path, struct.pack("<Q", len(header)) + header + rows.tobytes(), mode=0o600)


def read_signatures(path: Path, key: bytes) -> numpy.ndarray:
    """Another facility's signatures, one a row, mapped. Raises `DatasetError` for a file that is none, or of another
    salt."""
    try:
        with open(path, "rb") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            if size > MOST_HEADER:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size))
        metadata, (documents, numbers) = header["__metadata__"], header["signatures"]["shape"]
        if metadata["format"] != FORMAT or numbers != NUMBERS or type(documents) is not int or documents < 0:
            raise ValueError("another format")
        if os.path.getsize(path) != 8 + size + 4 * documents * NUMBERS:
            raise ValueError("another length than its header says")
    except (OSError, ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise DatasetError(f"{path} is not a file of `prepare --share-signatures`: {error}") from None
    if metadata.get("salt") != check_of(key):
        raise DatasetError(f"{path} was made with another salt: nothing in it could match; agree on one salt")
    if not documents:
        return numpy.empty((0, NUMBERS), dtype="<u4")
    return numpy.memmap(path, dtype="<u4", mode="r", offset=8 + size, shape=(documents, NUMBERS))
