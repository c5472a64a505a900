"""How a directory is cut for several streams: small files together in a tar, large ones in pieces of equal size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MOST_BYTES, LEAST_BYTES = 64 << 20, 4 << 20
"""Bounds of a piece: small enough that a broken connection repeats little, large enough that a command's two round
trips cost little."""
TURNS = 4
"""Pieces that each connection gets, so that all of them end at about the same time."""
SMALL_BYTES = 1 << 20
"""Files up to this size travel in a tar."""
TAR_BYTES = 32 << 20
"""Most bytes of files in one tar, which is read in memory: a facility may list twenty thousand of them."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file below the directory that travels; for a single file the path is empty."""

    path: str
    size: int
    """Bytes."""
    mode: int = 0o644


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A range of one file."""

    path: str
    offset: int
    length: int


def piece_size(entries: Iterable[Entry], streams: int) -> int:
    """Bytes of a piece for a number of streams."""
    total = sum(entry.size for entry in entries)
    return max(LEAST_BYTES, min(MOST_BYTES, -(-total // (streams * TURNS))))


def split_files(
    entries: Iterable[Entry], piece_bytes: int = MOST_BYTES
) -> tuple[list[Entry], list[Entry], list[Piece]]:
    """Small files, large files, and the large ones' pieces: equal in size to within a byte, largest first."""
    small, large, pieces = [], [], []
    for entry in entries:
        if entry.size <= SMALL_BYTES:
            small.append(entry)
            continue
        large.append(entry)
        count = -(-entry.size // piece_bytes)
        bounds = [entry.size * number // count for number in range(count + 1)]
        pieces += [
            Piece(path=entry.path, offset=start, length=end - start)
            for start, end in zip(bounds, bounds[1:], strict=False)
        ]
    pieces.sort(key=lambda piece: -piece.length)
    return small, large, pieces


def tar_batches(small: Iterable[Entry]) -> list[list[Entry]]:
    """The files in their order, at most `TAR_BYTES` of them together."""
    found: list[list[Entry]] = []
    filled = 0
    for entry in small:
        if not found or filled + entry.size > TAR_BYTES:
            found.append([])
            filled = 0
        found[-1].append(entry)
        filled += entry.size
    return found
