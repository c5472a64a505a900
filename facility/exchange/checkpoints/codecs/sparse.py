"""`sparse`: of a whole model's values those with the largest magnitude, each as a sign and one of eight magnitudes.

Top-k sparsification with error feedback (Stich, Cordonnier, Jaggi 2018, arXiv 1809.07599). A part of 65,536 values has
one bit per value that says whether it is kept, four bits for each kept one, and eight magnitudes of its own: at a
density of d, 1 + 4 d bits per value. The magnitudes are the means of eight ranges, about even on a logarithmic scale,
from the threshold to the part's largest. One threshold serves all tensors; it is a bfloat16 number, estimated from one
value in sixteen of large tensors, so the kept share is about the density.
"""

from __future__ import annotations

import numpy as np

from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.codecs import PART
from facility.exchange.checkpoints.floats import Array
from facility.exchange.delta_codecs import Codec, DeltaCodec, Marks, Selection

DECLARATION = DeltaCodec(
    name="sparse",
    summary="the values of largest magnitude, each as a sign and one of eight magnitudes",
    citation="Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, NeurIPS 2018 (arXiv 1809.07599)",
    implementation="CODEC",
    parameters=("sparse_density",),
    bytes_per_value=0.125,
    bytes_per_tensor=340.0,
    bytes_per_sent_value=0.5,
    selects=True,
)

LEVELS = 8
MAGNITUDE = np.uint32(0x7FFFFFFF)


def fields(elements: int, kept: int) -> list[tuple[str, str, int]]:
    """`kept`: bytes of all parts' codes."""
    return [("kept", "U8", -(-elements // 8)), ("code", "U8", kept), ("level", "F32", LEVELS * -(-elements // PART))]


def code_bytes(count: int) -> int:
    """For this many kept values of one part."""
    return -(-count // 2)


def reaching(values: Array, limit: float) -> int:
    """How many magnitudes reach `limit`."""
    return int(np.count_nonzero(np.abs(values) >= np.float32(limit)))


def encode(values: Array, limit: float) -> dict[str, Array]:
    """`values`: one part, finite; `limit`: more than 0."""
    found = native.library()
    if found is not None and values.flags.c_contiguous:
        bits, codes = np.empty(-(-len(values) // 8), np.uint8), np.empty(code_bytes(len(values)), np.uint8)
        levels = np.empty(LEVELS, np.float32)
        count = found.crossfed_sparse_encode(len(values), limit, *map(native.address, (values, bits, codes, levels)))
        return {"kept": bits, "code": codes[: code_bytes(count)], "level": levels}
    low = np.array([limit], np.float32).view(np.uint32)[0]
    magnitudes = values.view(np.uint32) & MAGNITUDE
    reach = magnitudes >= low
    top = max(low, magnitudes.max(initial=np.uint32(0)))
    per_level = np.float32(LEVELS) / np.float32(top - low + np.uint32(1))
    place = ((magnitudes[reach] - low).astype(np.float32) * per_level).astype(np.uint8)
    np.minimum(place, LEVELS - 1, out=place)
    place |= np.signbit(values[reach]).astype(np.uint8) << 3
    sums = np.zeros(LEVELS)
    for lane in range(4):  # in the order of the compiled code
        lane_sums = np.bincount(place[lane::4], values[reach][lane::4], 2 * LEVELS)
        sums += lane_sums[:LEVELS] - lane_sums[LEVELS:]
    counts = np.bincount(place & (LEVELS - 1), minlength=LEVELS)
    levels = np.divide(sums, counts, out=np.zeros(LEVELS), where=counts > 0).astype(np.float32)
    codes = np.zeros(2 * code_bytes(len(place)), np.uint8)
    codes[: len(place)] = place
    return {"kept": np.packbits(reach, bitorder="little"), "code": codes[0::2] | codes[1::2] << 4, "level": levels}


def count_of(kept: Array, elements: int) -> int:
    """How many values the bits of one part keep. Raises ValueError for bits past its end."""
    if elements % 8 and kept[-1] >> elements % 8:
        raise ValueError("bits are set past the end of the tensor")
    return int(np.count_nonzero(np.unpackbits(kept)))


def check_levels(levels: Array) -> None:
    """Raise `ValueError` where one is none that an encoder writes."""
    if not np.isfinite(levels).all():
        raise ValueError("a level is NaN or infinity")


def decode(stored: dict[str, Array], count: int) -> Array:
    """`count` float32 values, 0 where none was sent. Raises `ValueError` where what is stored is odd."""
    kept, codes, levels = stored["kept"], stored["code"], stored["level"]
    check_levels(levels)
    if len(codes) != code_bytes(count_of(kept, count)):
        raise ValueError("the codes are not as many as the bits that are set")
    found = native.library()
    if found is not None:
        values = np.empty(count, np.float32)
        found.crossfed_sparse_decode(count, *map(native.address, (kept, codes, levels, values)))
        return values
    values = np.zeros(count, np.float32)
    table = np.concatenate([levels, -levels])
    each = np.empty(2 * len(codes), np.uint8)
    each[0::2], each[1::2] = codes & 15, codes >> 4
    reach = np.unpackbits(kept, count=count, bitorder="little").view(bool)
    values[reach] = table[each[: np.count_nonzero(reach)]]
    return values


def selected_bytes(values: Array, limit: float) -> int:
    """Bytes of the codes of one part."""
    return code_bytes(reaching(values, limit))


def stored_bytes(stored: dict[str, Array], count: int) -> int:
    """Bytes of the codes of one part of `count` values, from its stored bits. Raises `ValueError`."""
    return code_bytes(count_of(stored["kept"], count))


CODEC = Codec(
    fields=fields,
    encode=encode,
    decode=decode,
    selection=Selection(field="code", length=selected_bytes, stored_length=stored_bytes),
    marks=Marks(kind="SPARSE", bits="kept", levels="level", levels_a_part=LEVELS, check=check_levels),
)
