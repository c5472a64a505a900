"""The mean walk of a round, as it is sent with the next model where `drift_correction` is on.

A walk is the change of a parameter in a round over the sum of the learning rates of its steps. AdamW's is at most about
1 a value, so one byte a value is enough: 8-bit floating point (E4M3: 4 bits of exponent, 3 of mantissa), 64 times as
large as the walk, which reaches from 7 down to 3e-5. What the rounding leaves stays at the coordinator and is added to
the mean of the next round.

    MODEL/mean_walk/model.safetensors   a tensor for each federated parameter, F8_E4M3; metadata `rounds`
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from facility.exchange.checkpoints.checkpoint import Checkpoint, open_checkpoint
from facility.exchange.checkpoints.floats import Array
from facility.exchange.errors import CheckpointError
from facility.exchange.json_text import parse_values
from facility.exchange.messages.plausible import MOST_ROUNDS

FOLDER = "mean_walk"
DTYPE = "F8_E4M3"
SCALE = 64.0
LARGEST = 448.0
"""Of E4M3, which has no infinity; its bytes 0x7F and 0xFF are NaN."""
ROUNDS = "rounds"
MOST_FACILITIES = 10_000


@functools.cache
def byte_values() -> Array:
    """The walk that each of the 256 bytes stands for, float32."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[(codes & 0x7F) == 0x7F] = np.nan
    return np.asarray(np.where(codes & 0x80, -size, size) / SCALE, np.float32)


@functools.cache
def _nearest() -> Array:
    """For the bits of each half-precision number, the byte of the nearest value, ties to an even byte."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    sizes = byte_values()[:0x7F].astype(np.float64) * SCALE
    middles = (sizes[1:] + sizes[:-1]) / 2
    codes = np.searchsorted(middles, halves, side="left")
    tied = np.isin(halves, middles)
    codes = np.where(tied & (codes % 2 == 1), codes + 1, codes)
    table = np.full(1 << 16, 0x7F, np.uint8)
    table[:0x7C00], table[0x8000 : 0x8000 + 0x7C00] = codes, codes | 0x80
    return table


def round_to_bytes(walk: Array) -> Array:
    """The bytes that a float32 or float64 walk is sent as; what is larger than 7 is cut."""
    scaled = np.clip(walk * SCALE, -LARGEST, LARGEST).astype(np.float16)
    return _nearest()[scaled.view(np.uint16)]


def has_mean_walk(directory: Path) -> bool:
    """Whether a mean walk lies beside a model."""
    return (Path(directory) / FOLDER).is_dir()


def metadata_of(rounds: Mapping[str, int]) -> dict[str, str]:
    """`rounds`: by facility, the round whose walk of it is in the mean."""
    return {"format": "pt", ROUNDS: json.dumps(dict(sorted(rounds.items())))}


def open_mean_walk(directory: Path) -> tuple[Checkpoint, dict[str, int]]:
    """The mean walk beside a model, and by facility the round whose walk of it is in the mean.

    Raises `CheckpointError` for anything that is not one.
    """
    checkpoint = open_checkpoint(Path(directory) / FOLDER)
    if odd := next((entry for entry in checkpoint.tensors.values() if entry.dtype != DTYPE), None):
        raise CheckpointError(f"{checkpoint.directory}: {odd.name!r:.80} is {odd.dtype}, expected {DTYPE}")
    try:
        found = parse_values(checkpoint.metadata.get(ROUNDS, "{}"))
    except ValueError:
        found = None
    if (
        not isinstance(found, dict)
        or len(found) > MOST_FACILITIES
        or not all(type(number) is int and 0 <= number <= MOST_ROUNDS for number in found.values())
    ):
        raise CheckpointError(f"{checkpoint.directory}: {ROUNDS!r} is not a round by facility")
    return checkpoint, found
