"""Masked updates in the kernel's one pass: their sum, the masks taken off, one step for the round.

    c = (sum of y_u - own streams of the survivors - streams that survivors have in common with absent ones)
        mod 2^bits, as a signed number, times the tensor's scale, over the sum of the survivors' weights

No single update exists here at any time: of the streams only those are known that the members have given away.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from coordinator.aggregation.steps import add_products
from facility.exchange.checkpoints.checkpoint import FLOATS, Checkpoint, TensorEntry
from facility.exchange.checkpoints.codecs import PART
from facility.exchange.checkpoints.floats import Array
from facility.exchange.errors import UpdateRefused
from facility.exchange.masking.fixed_point import HEADROOM, FixedPoint, clip_of, fixed_point
from facility.exchange.masking.streams import DTYPES, MaskBuffer, places_of
from facility.exchange.messages.masking import MaskedMoments


@dataclass(kw_only=True)
class Unmasking:
    """What takes the masks off one round's sum."""

    bits: int
    weights: Mapping[str, float]
    """Of every member of the roster; the scales make room for all of them."""
    survivors: Sequence[str]
    """Those whose updates are summed, sorted."""
    seeds: Sequence[tuple[int, bytes]]
    """1 or -1, and the seed of a stream that is to be added to the sum of what was sent."""
    clips: Mapping[str, float]
    default_clip: float
    moments: MaskedMoments | None = None
    """How second moments are masked; None: none are sent in this round."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What round.json says of the unmasking."""
    _points: dict[str, FixedPoint] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)
    _squares: dict[str, Fraction] = field(default_factory=dict)
    """Sum of squares of the step by tensor, exact: the same in whatever order pieces are added."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _elements: dict[str, int] = field(default_factory=dict)
    _local: threading.local = field(default_factory=threading.local)

    @property
    def shares(self) -> list[float]:
        """Share of each survivor in the mean; they sum to 1."""
        total = math.fsum(self.weights[name] for name in self.survivors)
        return [self.weights[name] / total for name in self.survivors]

    def prepare(self, floats: Mapping[str, TensorEntry], whole: Checkpoint) -> None:
        """Lay the federated tensors out in the streams. `whole`: the model that was sent."""
        self._elements = {name: entry.elements for name, entry in floats.items()}
        self._places = places_of(self._elements)
        for name, entry in floats.items():
            new = name not in whole.tensors
            clip = clip_of(name, entry.shape, clips=self.clips, default=self.default_clip, new=new)
            self._points[name] = fixed_point(self.bits, clip, self.weights)

    def unmask(self, name: str, begin: int, total: Array) -> None:
        """Take the masks off the sum of what was sent, in place: the elements of a tensor from `begin` on."""
        buffer = self._buffer()
        for sign, seed in self.seeds:
            buffer.add_to(total, sign, seed, self._places[name] + begin)

    def decode(self, name: str, total: Array, out: Array) -> None:
        """Write the round's step of a piece of a tensor from the sum without masks."""
        self._points[name].decode(total, math.fsum(self.weights[one] for one in self.survivors), out)
        squared = np.zeros((1, 1))
        add_products(squared, out[None])
        if np.isfinite(squared[0, 0]):  # else the next model is refused
            with self._lock:
                self._squares[name] = self._squares.get(name, Fraction()) + Fraction(float(squared[0, 0]))

    def next_clips(self) -> dict[str, float]:
        """Clips of the next round: a multiple of each tensor's root mean square in this round's step."""
        rms = {name: math.sqrt(float(squared) / self._elements[name]) for name, squared in self._squares.items()}
        return {
            name: min(self.default_clip, HEADROOM * value)
            for name, value in sorted(rms.items())
            if value * HEADROOM > 1e-30
        }

    def _buffer(self) -> MaskBuffer:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = MaskBuffer(PART, self.bits)
        return self._local.buffer  # type: ignore[no-any-return]


def match_masked(
    base: Checkpoint, update: Checkpoint, facility: str, bits: int, *, federated: Callable[[str], bool]
) -> dict[str, TensorEntry]:
    """The masked update's entry for each federated floating-point tensor. Raises `UpdateRefused` for any other set."""
    wanted = {name: entry for name, entry in base.tensors.items() if entry.dtype in FLOATS and federated(name)}
    if odd := sorted(wanted.keys() ^ update.tensors.keys()):
        raise UpdateRefused(
            facility, f"its masked tensors are not the model's: {len(odd)} names differ, such as {odd[:3]}"
        )
    for name, entry in wanted.items():
        found = update.tensors[name]
        if (found.dtype, found.shape) != (DTYPES[bits], entry.shape):
            raise UpdateRefused(
                facility,
                f"masked tensor {name!r} is {found.dtype} {list(found.shape)}, expected {DTYPES[bits]} "
                f"{list(entry.shape)}",
            )
    return dict(update.tensors)
