"""Floating-point dtypes of checkpoints as numpy arithmetic: widen to float32, round once on the way back.

numpy has no bfloat16; here it is the upper half of a float32 (Wang & Kanwar 2019), rounded to nearest, ties to even.
Every operation is an IEEE elementwise one, so the same input gives the same bits on every machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from facility.exchange.checkpoints import native

Array = NDArray[Any]
STORAGE: dict[str, Any] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
"""numpy dtype that holds each stored dtype's bytes."""
INFINITE, ROUNDED_UP = 0x7F800000, 0x7F7F8000
"""Bits of a float32: infinity, above which is NaN, and the least number that becomes infinity in bfloat16."""


def widen(raw: Array, dtype: str, out: Array) -> None:
    """Write the values of `raw` (stored as `dtype`, in its STORAGE dtype) to `out` (float32 or float64)."""
    found = native.library() if dtype in ("BF16", "F16") and out.dtype == np.float32 else None
    if found is not None and raw.flags.c_contiguous and out.flags.c_contiguous:
        found.crossfed_widen(len(raw), native.address(raw), native.KINDS[dtype], native.address(out))
    elif dtype == "BF16":
        bits = out.view(np.uint32) if out.dtype == np.float32 else np.empty(len(out), np.uint32)
        np.copyto(bits, raw)
        np.left_shift(bits, 16, out=bits)
        if out.dtype != np.float32:
            np.copyto(out, bits.view(np.float32))
    else:
        np.copyto(out, raw, casting="same_kind")


def narrow(values: Array, dtype: str, out: Array, scratch: Array) -> bool:
    """Round `values` (float32 or float64) once into `out` (STORAGE of `dtype`); `scratch`: uint32, as long.

    Returns whether every value in `out` is finite; NaN stays NaN.

    float64 goes to bfloat16 by round-to-odd float32, so that it, too, is rounded only once (Boldo & Melquiond 2008).
    """
    found = native.library() if values.flags.c_contiguous and out.flags.c_contiguous else None
    if dtype != "BF16":
        if found is not None and dtype == "F16" and values.dtype == np.float32:
            return bool(found.crossfed_narrow_half(len(values), native.address(values), native.address(out)))
        with np.errstate(over="ignore"):
            np.copyto(out, values, casting="same_kind")
        return bool(np.isfinite(out).all())
    if values.dtype == np.float64:
        values = to_odd_float32(values)
    if found is not None and values.flags.c_contiguous:
        return bool(found.crossfed_narrow(len(values), native.address(values), native.address(out)))
    bits = values.view(np.uint32)
    np.right_shift(bits, 16, out=scratch)
    np.bitwise_and(scratch, 1, out=scratch)
    np.add(scratch, 0x7FFF, out=scratch)
    np.add(scratch, bits, out=scratch)
    np.right_shift(scratch, 16, out=scratch)
    np.copyto(out, scratch, casting="unsafe")
    np.bitwise_and(bits, 0x7FFFFFFF, out=scratch)
    largest = scratch.max(initial=0)
    if largest > INFINITE:  # rounded, a NaN may be a number
        np.copyto(out, (bits >> 16) | 0x40, where=scratch > INFINITE, casting="unsafe")
    return bool(largest < ROUNDED_UP)


def to_odd_float32(values: Array) -> Array:
    """float64 to float32, rounding inexact values to the neighbour with an odd last bit."""
    with np.errstate(over="ignore"):
        nearest = values.astype(np.float32)
    bits = nearest.view(np.uint32)
    inexact = np.isfinite(nearest) & (nearest.astype(np.float64) != values)
    even = inexact & ((bits & 1) == 0)
    # An even neighbour is replaced by the odd one on the other side of the value: one step in magnitude.
    step = np.where(np.abs(nearest.astype(np.float64)) < np.abs(values), 1, -1)
    return np.where(even, bits.astype(np.int64) + step, bits).astype(np.uint32).view(np.float32)
