"""Mask streams: AES-256 in counter mode under a seed, readable from any offset on.

Every tensor has its place in one stream: the federated tensors in the order of their names, each beginning at a
multiple of 16 elements. NIST SP 800-38A, section 6.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from facility.exchange.checkpoints.floats import Array
from facility.exchange.masking.key_stream import BLOCK, KeyStream

SEED_BYTES = 32
UNSIGNED: dict[int, Any] = {16: np.dtype("<u2"), 32: np.dtype("<u4"), 64: np.dtype("<u8")}
SIGNED: dict[int, Any] = {16: np.dtype("<i2"), 32: np.dtype("<i4")}
DTYPES = {16: "U16", 32: "U32", 64: "U64"}
"""safetensors names of what is sent, by bits; 64 are of second moments."""


def places_of(elements: Mapping[str, int]) -> dict[str, int]:
    """First element of each tensor in a mask stream, from the number of elements by name."""
    places, position = {}, 0
    for name in sorted(elements):
        places[name] = position
        position += -(-elements[name] // BLOCK) * BLOCK
    return places


@lru_cache(maxsize=1)
def _zeros(count: int) -> memoryview:
    """Bytes of zero that all threads share."""
    return memoryview(bytes(count))


class MaskBuffer:
    """One thread's memory for `rows` streams of at most `elements` values of `bits` bits."""

    def __init__(self, elements: int, bits: int, rows: int = 1) -> None:
        self.bits, self._zeros = bits, _zeros(elements * bits // 8)
        self._space = np.empty((rows, elements + BLOCK), UNSIGNED[bits])
        self._rows = [row.data.cast("B") for row in self._space]
        self._streams: dict[bytes, KeyStream] = {}
        """Streams that have begun, by their seed."""

    def read(self, seed: bytes, start: int, count: int) -> Array:
        """Elements `start` to `start + count` of the stream; the array is overwritten by the next call."""
        return self.read_all([seed], start, count)[0]

    def read_all(self, seeds: Sequence[bytes], start: int, count: int) -> Array:
        """Numbers `start` to `start + count` of several streams, a row each; at most `rows` of them."""
        item = self.bits // 8
        zeros = self._zeros[: count * item]
        for row, seed in zip(self._rows, seeds, strict=False):
            if seed not in self._streams:
                self._streams[seed] = KeyStream(seed)
            self._streams[seed].write(row, start * item, zeros)
        return self._space[: len(seeds), :count]

    def add_to(self, numbers: Array, sign: int, seed: bytes, start: int) -> None:
        """Add a stream's elements from `start` on to whole numbers of its size, in place; -1: subtract them."""
        (np.add if sign > 0 else np.subtract)(numbers, self.read(seed, start, len(numbers)), out=numbers)
