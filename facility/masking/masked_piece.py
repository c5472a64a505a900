"""A piece of an update, from stored values to what is sent, in one pass while it is in a core's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.delta_parts import write_difference
from facility.exchange.checkpoints.floats import STORAGE, Array, narrow, widen
from facility.exchange.masking.fixed_point import FixedPoint
from facility.exchange.masking.streams import UNSIGNED, MaskBuffer

RESTS = {16: "BF16", 32: "F32"}
"""safetensors dtype of what is not sent, by bits. bfloat16 keeps what 16 bits leave to a 512th of it."""


def count_clipped(rest: Array, unit: float) -> int:
    """How many values the clip cut off: within it, no more than half a unit is left. `rest`: as `RESTS` stores it."""
    if rest.dtype == np.uint16:
        limit = np.float32(unit).view(np.uint32) >> np.uint32(16)
        return int(np.count_nonzero((rest & np.uint16(0x7FFF)) > np.uint16(limit)))
    return int(np.count_nonzero(np.abs(rest) > np.float32(unit)))


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Values as they lie in a file."""

    values: Array
    dtype: str
    """safetensors name."""


class Masker:
    """What is equal for all pieces of an update, and one thread's memory for them."""

    def __init__(self, masks: Sequence[tuple[int, bytes]], *, piece: int, bits: int, weight: float, factor: float):
        """`masks`: 1 or -1, and the seed of each stream. `factor`: what a step is multiplied by. `piece`: elements."""
        self.seeds = [seed for _, seed in masks]
        self.signs = np.array([sign for sign, _ in masks], dtype=np.int8)
        self.weight, self.factor, self.bits = weight, np.float32(factor), bits
        self._streams = MaskBuffer(piece, bits, rows=len(masks))
        self._sent, self._rest = np.empty(piece, UNSIGNED[bits]), np.empty(piece, STORAGE[RESTS[bits]])
        self._step, self._scratch = np.empty(piece, np.float32), np.empty(piece, np.float32)
        self._left = np.empty(piece, np.float32)

    def mask(
        self, update: Stored, base: Stored | None, point: FixedPoint, place: int, *, clips: bool = True
    ) -> tuple[Array, Array, float]:
        """What is sent, what it leaves of the step (stored as `RESTS` says), and the sum of squares of update - base.

        `base` None: the step is the update. `place`: the piece's first element in the streams. `clips`: the step is
        multiplied by the factor. Both arrays are overwritten by the next call.
        """
        count = len(update.values)
        streams = self._streams.read_all(self.seeds, place, count)
        sent, rest = self._sent[:count], self._rest[:count]
        kinds = native.KINDS
        factor = self.factor if clips else np.float32(1)
        found = native.library()
        if found is None or update.dtype not in kinds or (base is not None and base.dtype not in kinds):
            return sent, rest, self._in_passes(update, base, point, streams, sent, rest, factor)
        function = found.crossfed_masked16 if self.bits == 16 else found.crossfed_masked32
        squared = function(
            count,
            native.address(update.values),
            kinds[update.dtype],
            None if base is None else native.address(base.values),
            0 if base is None else kinds[base.dtype],
            float(factor),
            point.clip,
            self.weight / point.scale,
            point.scale / self.weight,
            len(self.seeds),
            native.address(streams),
            streams.strides[0] // streams.itemsize,
            native.address(self.signs),
            native.address(sent),
            native.address(rest),
        )
        return sent, rest, float(squared)

    def _in_passes(
        self,
        update: Stored,
        base: Stored | None,
        point: FixedPoint,
        streams: Array,
        sent: Array,
        rest: Array,
        factor: np.float32,
    ) -> float:
        """Mask a piece without a compiler: the law in tests/masking holds both ways to the same bits."""
        step, scratch = self._step[: len(sent)], self._scratch[: len(sent)]
        if base is None:
            widen(update.values, update.dtype, step)
            squared = float(np.vdot(step, step))
        else:
            squared = write_difference(base.values, base.dtype, update.values, update.dtype, step, scratch)
        if factor != 1:
            np.multiply(step, factor, out=step)
        left = self._left[: len(sent)]
        point.encode(step, self.weight, left, sent)
        narrow(left, RESTS[self.bits], rest, scratch.view(np.uint32))
        for sign, stream in zip(self.signs, streams, strict=True):
            (np.add if sign > 0 else np.subtract)(sent, stream, out=sent)
        return squared
