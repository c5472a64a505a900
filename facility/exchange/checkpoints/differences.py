"""What a message encodes of two models: their difference part by part, with what the message before left of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from facility.exchange.checkpoints.checkpoint import TensorEntry
from facility.exchange.checkpoints.codecs import PART
from facility.exchange.checkpoints.delta_parts import read_parts, write_difference
from facility.exchange.checkpoints.floats import STORAGE, Array, widen
from facility.exchange.delta_codecs import Codec
from facility.exchange.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Left:
    """What the message before left of each tensor, in float32; no tensors: nothing."""

    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    fading: float = 0.0
    """It is added to the difference times this."""


NOTHING = Left()


def steps_of(codec: Codec, old: TensorEntry, new: TensorEntry, left: Left) -> Iterator[tuple[int, Array, Array, float]]:
    """What the codec encodes, as `read_differences` yields it."""
    return bit_differences(old, new) if codec.of_bits else read_differences(old, new, left=left)


def bit_differences(old: TensorEntry, new: TensorEntry) -> Iterator[tuple[int, Array, Array, float]]:
    """(first element, old as stored, new - old of the stored whole numbers, how many differ): each part.

    Raises `CheckpointError` for other dtypes than the reference's, and for NaN and infinity.
    """
    if new.dtype != old.dtype:
        raise CheckpointError(f"tensor {new.name!r} is {new.dtype}, the reference has {old.dtype}: send it in full")
    values = np.empty(PART, np.float64 if old.dtype == "F64" else np.float32)
    signed = f"<i{STORAGE[old.dtype].itemsize}"
    for start, (base, update) in read_parts([old, new]):
        widen(update, new.dtype, values[: len(update)])
        if not np.isfinite(values[: len(update)]).all():
            raise CheckpointError(f"{new.file}: tensor {new.name!r} holds NaN or infinity")
        step = update.view(signed) - base.view(signed)
        yield start, base, step, float(np.count_nonzero(step))


def read_differences(
    old: TensorEntry, new: TensorEntry, width: int = PART, left: Left = NOTHING
) -> Iterator[tuple[int, Array, Array, float]]:
    """(first element, old as stored, new - old in float32, its sum of squares): the first `width` values of each part.

    The array is used again for the next part.
    """
    block, widened = np.empty(PART, np.float32), np.empty(PART, np.float32)
    more = [left.tensors[old.name]] if old.name in left.tensors else []
    if more and (more[0].shape, more[0].dtype) != (old.shape, "F32"):
        found = f"{more[0].dtype} {list(more[0].shape)}"
        raise CheckpointError(f"{more[0].file}: tensor {old.name!r} is {found}, expected F32 {list(old.shape)}")
    for start, (base, update, *before) in read_parts([old, new, *more], width):
        values = block[: len(base)]
        squared = write_difference(base, old.dtype, update, new.dtype, values, widened[: len(values)])
        for rest in before:
            np.multiply(rest, np.float32(left.fading), out=widened[: len(values)])
            values += widened[: len(values)]
            squared = float(np.vdot(values, values))
        if not math.isfinite(squared):
            raise CheckpointError(f"{new.file}: tensor {new.name!r} holds NaN, infinity or absurdly large values")
        yield start, base, values, squared
