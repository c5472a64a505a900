"""Steps as whole numbers modulo 2^bits, so that masks cancel exactly: one scale a tensor, agreed before the round.

A facility sends round(weight * step / scale). The scale makes room for the sum of all facilities of the roster: with
every value of a step within the tensor's clip, no sum wraps. What rounding and the clip take away stays at the facility
and is added to its next round. The error of the mean is scale * sqrt(N / 12) / sum of weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.floats import Array
from facility.exchange.masking.streams import SIGNED, UNSIGNED

HEADROOM = 64.0
"""A tensor's clip, in multiples of the root mean square of the round's mean before."""


@dataclass(frozen=True, kw_only=True)
class FixedPoint:
    """How the values of one tensor become whole numbers."""

    bits: int
    clip: float
    """Largest magnitude of a step's value that is sent."""
    scale: float
    """What one unit of the whole numbers stands for."""

    def encode(self, step: Array, weight: float, rest: Array, out: Array | None = None) -> Array:
        """The whole numbers of a step (contiguous float32), modulo 2^bits; `rest` becomes what they leave of it.

        `out`: memory for the result, of `UNSIGNED[bits]`; None: new.
        """
        made = np.empty(len(step), UNSIGNED[self.bits]) if out is None else out
        per_unit, unit = weight / self.scale, self.scale / weight
        if (found := native.library()) is not None:
            function = found.crossfed_fixed16 if self.bits == 16 else found.crossfed_fixed32
            function(len(step), self.clip, per_unit, unit, *map(native.address, (step, made, rest)))
            return made
        units = step.astype(np.float64)
        np.clip(units, -self.clip, self.clip, out=units)  # in float64: the clip rounded to float32 could be beyond it
        np.multiply(units, per_unit, out=units)
        np.rint(units, out=units)
        np.subtract(step, units * unit, out=rest, casting="same_kind")
        np.copyto(made.view(SIGNED[self.bits]), units, casting="unsafe")
        return made

    def decode(self, total: Array, weights: float, out: Array) -> None:
        """Write the mean: the unmasked sum of all numbers, over the sum of the weights."""
        values = total.view(SIGNED[self.bits])
        if self.bits == 16 and out.dtype == np.float32:
            np.multiply(values, np.float32(self.scale / weights), out=out, casting="unsafe")
        else:
            np.multiply(values, self.scale / weights, out=out, casting="unsafe")


def fixed_point(bits: int, clip: float, weights: Mapping[str, float]) -> FixedPoint:
    """The fixed point of one tensor for a roster with these weights, each at most 1."""
    largest = 2 ** (bits - 1) - len(weights)
    return FixedPoint(bits=bits, clip=clip, scale=clip * math.fsum(weights.values()) / largest)


def clip_of(name: str, shape: tuple[int, ...], *, clips: Mapping[str, float], default: float, new: bool) -> float:
    """Clip of a tensor: its own, or the largest step that a round can take. `new`: the model has no such tensor.

    A new adapter's A begins with values of at most 1 / sqrt(inputs) (Kaiming's uniform with a = sqrt(5), as peft does).
    """
    if name in clips:
        return clips[name]
    return default + (1 / math.sqrt(max(1, shape[-1])) if new and len(shape) == 2 else 0.0)
