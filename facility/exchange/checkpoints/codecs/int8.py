"""`delta-int8`: blocks of 256 values, each a whole number from -127 to 127 times the block's float32 scale.

Linear quantisation by the block's largest magnitude (Dettmers et al. 2022, arXiv 2110.02861, section 2, with a linear
map): 1.016 bytes a value, 51 % of bfloat16, and an error of 0.7 % of the rms of normally distributed values.
"""

from __future__ import annotations

import numpy as np

from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.floats import Array
from facility.exchange.delta_codecs import Blocks, Codec, DeltaCodec

DECLARATION = DeltaCodec(
    name="delta-int8",
    summary="blocks of 256 values, each a whole number from -127 to 127 times the block's scale",
    citation="Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022 (arXiv 2110.02861)",
    implementation="CODEC",
    bytes_per_value=1.015625,
    bytes_per_tensor=210.0,
)

BLOCK = 256
LEVELS = 127
SMALLEST = np.float32(1e-35)
"""Blocks whose scale is smaller are sent as zero."""


def fields(elements: int, kept: int) -> list[tuple[str, str, int]]:
    """(field, dtype, elements) of a message for `elements` values."""
    return [("q", "I8", elements), ("scale", "F32", -(-elements // BLOCK))]


def encode(values: Array, limit: float = 0.0) -> dict[str, Array]:
    """int8 values and a scale for each block of `BLOCK`; `limit` is not used."""
    found = native.library()
    if found is not None and values.flags.c_contiguous:
        q, scale = np.empty(len(values), np.int8), np.empty(-(-len(values) // BLOCK), np.float32)
        found.crossfed_int8_encode(
            len(values), BLOCK, 1 / LEVELS, SMALLEST, native.address(values), native.address(q), native.address(scale)
        )
        return {"q": q, "scale": scale}
    rows = pad_to_block(values, BLOCK).reshape(-1, BLOCK)
    high, low = rows.max(axis=1), rows.min(axis=1)
    scale = np.maximum(high, -low) * np.float32(1 / LEVELS)
    scale[scale < SMALLEST] = 0
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    scaled = rows * inverse[:, None]
    np.rint(scaled, out=scaled)
    return {"q": scaled.astype(np.int8).reshape(-1)[: len(values)], "scale": scale}


def check(scale: Array) -> None:
    """Raise `ValueError` for a scale that no sender makes."""
    if not np.isfinite(scale).all() or (scale < 0).any():
        raise ValueError("a scale is negative, NaN or infinity")


def decode(stored: dict[str, Array], count: int) -> Array:
    """`count` float32 values. Raises `ValueError` where a scale is odd."""
    scale = stored["scale"]
    check(scale)
    found = native.library()
    if found is not None:
        values = np.empty(count, np.float32)
        found.crossfed_int8_decode(
            count, BLOCK, native.address(stored["q"]), native.address(scale), native.address(values)
        )
        return values
    rows = pad_to_block(stored["q"].astype(np.float32), BLOCK).reshape(-1, BLOCK)
    rows *= scale[:, None]
    return rows.reshape(-1)[:count]


def pad_to_block(values: Array, block: int) -> Array:
    """`values`, with zeros up to a multiple of `block`."""
    missing = -len(values) % block
    return np.concatenate([values, np.zeros(missing, values.dtype)]) if missing else values


CODEC = Codec(
    fields=fields,
    encode=encode,
    decode=decode,
    blocks=Blocks(kind="INT8", numbers="q", scales="scale", check=check),
)
