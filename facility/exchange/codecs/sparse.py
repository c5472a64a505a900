"""`sparse`: the values with the largest magnitude of each tensor, in bfloat16, with their positions.

Top-k sparsification with error feedback (Stich, Cordonnier, Jaggi 2018, arXiv 1809.07599): four bytes a value kept, so a
tenth of bfloat16 at a density of 5 %. The threshold lies on the grid of bfloat16 numbers and, in large tensors, comes
from one value in sixteen, so the kept share is about the density. Positions count from the beginning of each part of 65,536 values.
"""

from __future__ import annotations

import numpy as np

from facility.exchange import native
from facility.exchange.floats import Array, narrow

from . import PART

BINS = 1 << 15


def fields(elements: int, kept: int) -> list[tuple[str, str, int]]:
    return [("position", "U16", kept), ("value", "BF16", kept), ("count", "I32", -(-elements // PART))]


def histogram(values: Array) -> Array:
    """How many magnitudes fall between one bfloat16 number and the next."""
    return np.bincount((values.view(np.uint32) >> 16) & 0x7FFF, minlength=BINS)


def threshold(counts: Array, density: float) -> float:
    """The largest grid value above zero that at least `density` of the counted magnitudes reach."""
    reached = np.cumsum(counts[::-1])[::-1]
    enough = np.nonzero(reached >= density * reached[0])[0]
    place = max(1, int(enough[-1]))
    return float(np.array([place << 16], np.uint32).view(np.float32)[0])


def reaching(values: Array, limit: float) -> int:
    """How many magnitudes reach `limit`."""
    return int(np.count_nonzero(np.abs(values) >= np.float32(limit)))


def encode(values: Array, limit: float) -> dict[str, Array]:
    found = native.library()
    if found is not None and values.flags.c_contiguous:
        positions: Array = np.empty(len(values), np.uint16)
        largest: Array = np.empty(len(values), np.float32)
        count = found.crossfed_sparse_encode(
            len(values), limit, native.address(values), native.address(positions), native.address(largest)
        )
        positions, largest = positions[:count].copy(), largest[:count]
    else:
        places = np.nonzero(np.abs(values) >= np.float32(limit))[0]
        largest, positions = values[places], places.astype(np.uint16)
    kept = np.empty(len(positions), np.uint16)
    narrow(largest, "BF16", kept, np.empty(len(positions), np.uint32))
    return {"position": positions, "value": kept, "count": np.array([len(positions)], np.int32)}


def decode(stored: dict[str, Array], count: int) -> Array:
    positions = stored["position"].astype(np.int64)
    if len(positions) and (positions[-1] >= count or (np.diff(positions) <= 0).any()):
        raise ValueError("positions are not ascending within the part")
    kept = (stored["value"].astype(np.uint32) << 16).view(np.float32)
    if not np.isfinite(kept).all():
        raise ValueError("a value is NaN or infinity")
    values = np.zeros(count, np.float32)
    values[positions] = kept
    return values
