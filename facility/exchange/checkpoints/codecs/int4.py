"""`delta-int4`: blocks of 64 values, each a whole number from -8 to 7 times the block's bfloat16 scale.

The scale carries a sign, so that the value with the largest magnitude is -8 steps and all sixteen are used. Two values
a byte, the first in the low half: 0.531 bytes a value, 27 % of bfloat16, and an error of 9.5 % of the rms of normally
distributed values, which error feedback at the sender makes up for over the rounds.
"""

from __future__ import annotations

import numpy as np

from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.codecs.int8 import SMALLEST, pad_to_block
from facility.exchange.checkpoints.floats import Array
from facility.exchange.delta_codecs import Blocks, Codec, DeltaCodec

DECLARATION = DeltaCodec(
    name="delta-int4",
    summary="blocks of 64 values, each a whole number from -8 to 7 times the block's scale",
    implementation="CODEC",
    bytes_per_value=0.53125,
    bytes_per_tensor=210.0,
)

BLOCK = 64
LEVELS = 8


def fields(elements: int, kept: int) -> list[tuple[str, str, int]]:
    """(field, dtype, elements) of a message for `elements` values."""
    return [("q", "U8", -(-elements // 2)), ("scale", "BF16", -(-elements // BLOCK))]


def encode(values: Array, limit: float = 0.0) -> dict[str, Array]:
    """Two values of 4 bits in a byte, and a scale for each block; `limit` is not used."""
    found = native.library()
    if found is not None and values.flags.c_contiguous:
        q, bits = np.empty(-(-len(values) // 2), np.uint8), np.empty(-(-len(values) // BLOCK), np.uint16)
        found.crossfed_int4_encode(
            len(values), BLOCK, LEVELS, SMALLEST, native.address(values), native.address(q), native.address(bits)
        )
        return {"q": q, "scale": bits}
    whole = pad_to_block(values, BLOCK)
    rows, starts = whole.reshape(-1, BLOCK), np.arange(0, len(whole), BLOCK)
    high, low = np.maximum.reduceat(whole, starts), np.minimum.reduceat(whole, starts)  # faster than over short rows
    scale = np.where(high > -low, -high, -low) * np.float32(1 / LEVELS)
    scale[np.abs(scale) < SMALLEST] = 0
    # To the next bfloat16 away from zero, so that no value exceeds the eighth step.
    bits = ((scale.view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)
    scale = (bits.astype(np.uint32) << 16).view(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    scaled = rows * inverse[:, None]
    np.rint(scaled, out=scaled)
    np.minimum(scaled, np.float32(LEVELS - 1), out=scaled)
    scaled += np.float32(LEVELS)
    nibbles = scaled.astype(np.uint8).reshape(-1).view("<u2")
    packed = (nibbles | (nibbles >> 4)).astype(np.uint8)  # the low byte: the first, and the second times sixteen
    return {"q": packed[: -(-len(values) // 2)], "scale": bits}


def check_scales(bits: Array) -> None:
    """Raise `ValueError` for a scale that no sender makes."""
    if ((bits & 0x7F80) == 0x7F80).any():  # an exponent of all ones
        raise ValueError("a scale is NaN or infinity")


def decode(stored: dict[str, Array], count: int) -> Array:
    """`count` float32 values. Raises `ValueError` where what is stored is odd."""
    check_scales(stored["scale"])
    packed = stored["q"]
    found = native.library()
    if found is not None:
        values = np.empty(count, np.float32)
        found.crossfed_int4_decode(
            count, BLOCK, LEVELS, native.address(packed), native.address(stored["scale"]), native.address(values)
        )
        return values
    scale = (stored["scale"].astype(np.uint32) << 16).view(np.float32)
    values = np.empty(2 * len(packed), np.float32)
    values[0::2] = packed & 15
    values[1::2] = packed >> 4
    values = values[:count]
    values -= np.float32(LEVELS)
    rows = pad_to_block(values, BLOCK).reshape(-1, BLOCK)
    return (rows * scale[:, None]).reshape(-1)[:count]


CODEC = Codec(
    fields=fields,
    encode=encode,
    decode=decode,
    blocks=Blocks(kind="INT4", numbers="q", scales="scale", check=check_scales),
)
