"""Second moments under masks, as both sides must agree on them: whole numbers modulo 2^64 over one public range.

Gradients are clipped to a norm c (`training.clip_norm`) before AdamW squares them, so no second moment, nor any mean of
some, is above c^2: the range is known before anything is trained, whatever a facility's data. In the sum over N
facilities a unit is c^2 times the sum of the weights, over 2^62, so the mean is off by at most N c^2 / 2^63, besides
its rounding to float32 (where facilities are lost, by as many times that as the roster weighs more than the rest).
With c = 1 and four facilities the root of that, by which AdamW divides, is 7e-10, where `epsilon` is 1e-8.

    UPDATE/second_moments/model.safetensors      NAME::masked  U64 (rows + columns + 1), of every federated tensor

Row means, column means (of a matrix), and last c^2 where the facility has second moments of the parameter; zeros where
it has none. Masks are streams of their own, whose seeds follow from those of the update's.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from facility.exchange.checkpoints.codecs import PART
from facility.exchange.checkpoints.floats import Array
from facility.exchange.checkpoints.second_moments import Factors
from facility.exchange.masking.streams import MaskBuffer, places_of

BITS = 64
MARK = "::masked"
UNITS = 2.0**62
"""Of the sum of all facilities at the range: a quarter of what 64 bits hold."""
PURPOSE = b"crossfed second moments"


def seed_of(seed: bytes) -> bytes:
    """The seed of the stream that masks second moments, from that of the update's."""
    return hmac.digest(seed, PURPOSE, hashlib.sha256)


def error_of(largest: float, facilities: int) -> float:
    """The most that a mean of second moments is off, before it is rounded to float32; `largest`: the range."""
    return facilities * largest / (2 * UNITS)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a parameter's second moments lie."""

    shape: tuple[int, ...]
    """Shape of the parameter."""
    start: int
    """First element in the streams."""

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        """Column means; a vector has none."""
        return math.prod(self.shape[1:]) if len(self.shape) > 1 else 0

    @property
    def values(self) -> int:
        """Numbers that are sent."""
        return self.rows + self.columns + 1

    def joined(self, factors: Factors | None, largest: float) -> Array:
        """What is sent of a parameter, float64; None: the facility has none."""
        if factors is None:
            return np.zeros(self.values)
        columns = [] if factors.columns is None else [factors.columns]
        return np.concatenate([factors.rows, *columns, [largest]], dtype=np.float64)

    def split(self, means: Array, share: float) -> Factors:
        """Factors from means over all facilities, of which those that have any count `share`."""
        values = (means[:-1] / share).astype(np.float32)
        return Factors(values[: self.rows], values[self.rows :] if self.columns or len(self.shape) > 1 else None)


def moment_places(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """By parameter, in the order of their names."""
    sizes = {name: Place(shape=tuple(shape), start=0).values for name, shape in sorted(shapes.items())}
    starts = places_of(sizes)
    return {name: Place(shape=tuple(shapes[name]), start=starts[name]) for name in sizes}


def add_streams(numbers: Array, place: Place, streams: Sequence[tuple[int, bytes]], buffer: MaskBuffer) -> None:
    """Add mask streams to a parameter's whole numbers, in place. `streams`: 1 or -1, and the seed of each."""
    for start in range(0, len(numbers), PART):
        piece = numbers[start : start + PART]
        for sign, seed in streams:
            buffer.add_to(piece, sign, seed, place.start + start)


@dataclass(frozen=True, kw_only=True)
class Units:
    """Second moments as whole numbers, for a roster with these weights."""

    largest: float
    """The range."""
    weights: Mapping[str, float]

    @property
    def unit(self) -> float:
        return self.largest * math.fsum(self.weights.values()) / UNITS

    def encode(self, values: Array, weight: float) -> Array:
        """The numbers of values in float64; what is beyond the range counts as at its end."""
        units = np.rint(np.clip(values, 0.0, self.largest) * (weight / self.unit))
        return units.astype(np.int64).view(np.uint64)

    def decode(self, total: Array, weight: float) -> Array:
        """Means in float64 from the unmasked sum; `weight`: the sum of the weights of those that it is over.

        Negative only where some facility lied.
        """
        return total.view(np.int64) * (self.unit / weight)
