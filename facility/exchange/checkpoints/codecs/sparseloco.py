"""`sparseloco`: of every 4,096 values the 88 of largest magnitude, each as a sign and one of two magnitudes.

"SparseLoCo", 2025, arXiv 2508.15706, algorithm 1, for federations of many rounds over slow links. With D a facility's
step of a round and e what it has not sent,

    e <- 0.95 e + D;   sent = Q(the largest of each 4,096 of e);   e <- e - sent

Training begins from the received model, as in the paper, plus e times `training.unsent_share`: one that sees nothing of
what it has not sent walks the same way in each round. D is what is walked from there. Q keeps the sign and one of two
magnitudes: the means of the larger and of the smaller half of what is kept.

The paper and Covenant-72B (arXiv 2603.08163) keep 64 of 4,096 with twelve bits for each place, 1.4 % of bfloat16.
Here places are sorted and written as P. Elias (J. ACM 21, 1974) and R. Fano (1971) write increasing numbers: five low
bits each, and the rest of all of them in unary, in a string of bits whose length does not depend on the places. That
takes 7.5 bits a place, so that 88 values take 108 bytes: 1.3 %.
"""

from __future__ import annotations

import numpy as np

from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.codecs.int4 import check_scales
from facility.exchange.checkpoints.floats import Array
from facility.exchange.delta_codecs import Blocks, Codec, DeltaCodec

DECLARATION = DeltaCodec(
    name="sparseloco",
    summary="of every 4,096 values the 88 of largest magnitude, each as a sign and one of two magnitudes",
    citation="SparseLoCo, 2025, arXiv 2508.15706",
    implementation="CODEC",
    bytes_per_value=0.0263671875,
    bytes_per_tensor=250.0,
    fading=0.95,
    least_rounds=100,
)

CHUNK, KEPT = 4096, 88
LOW = 5
"""Bits of a place that are written as they are."""
NEGATIVE_ZERO = 0x8000
NOT_SO_MANY = f"a chunk has other than {KEPT} places, or as many as it has values"
NOT_INCREASING = "the places of a chunk do not increase, or lie past its end"


def kept_of(count: int) -> int:
    """How many of a chunk's `count` values travel: of a short one, as a tensor's last may be, as many as of a whole."""
    return min(count, KEPT)


def streams_of(count: int) -> tuple[int, int, int, int]:
    """Bytes of a chunk's high bits of places, low bits, signs, and halves."""
    kept = kept_of(count)
    bits = (kept + (count - 1 >> LOW) + 1, LOW * kept, kept, kept)
    return (-(-bits[0] // 8), -(-bits[1] // 8), -(-bits[2] // 8), -(-bits[3] // 8))


def fields(elements: int, kept: int) -> list[tuple[str, str, int]]:
    """(field, dtype, elements) of a message for `elements` values."""
    whole, rest = divmod(elements, CHUNK)
    code = whole * sum(streams_of(CHUNK)) + (sum(streams_of(rest)) if rest else 0)
    return [("code", "U8", code), ("level", "BF16", 2 * -(-elements // CHUNK))]


def chunks(values: Array) -> list[Array]:
    """A part as rows of whole chunks, and the rest as one row; what is empty is left out."""
    end = len(values) // CHUNK * CHUNK
    rows = [values[:end].reshape(-1, CHUNK), values[None, end:]]
    return [one for one in rows if one.size]


def encode(values: Array, limit: float = 0.0) -> dict[str, Array]:
    found = [_encode_rows(rows) for rows in chunks(values)]
    return {
        "code": np.concatenate([code.reshape(-1) for code, _ in found] or [np.empty(0, np.uint8)]),
        "level": np.concatenate([levels.reshape(-1) for _, levels in found] or [np.empty(0, np.uint16)]),
    }


def _encode_rows(rows: Array) -> tuple[Array, Array]:
    """Codes (chunks, bytes) and levels (chunks, 2), bfloat16 bits, of chunks (chunks, values)."""
    count, kept = rows.shape[1], kept_of(rows.shape[1])
    sizes = np.abs(rows)
    places = np.sort(np.argpartition(sizes, count - kept, axis=1)[:, count - kept :], axis=1)
    sizes, number = np.take_along_axis(sizes, places, axis=1), np.arange(kept)
    larger = np.zeros(places.shape, bool)
    np.put_along_axis(larger, np.argpartition(sizes, kept // 2, axis=1)[:, kept // 2 :], True, axis=1)
    means = np.stack([_means(sizes, ~larger), _means(sizes, larger)], axis=1)
    high = np.zeros((len(rows), kept + (count - 1 >> LOW) + 1), bool)
    np.put_along_axis(high, (places >> LOW) + number, True, axis=1)
    low = (places[:, :, None] >> np.arange(LOW) & 1).astype(bool).reshape(len(rows), -1)
    signs = np.take_along_axis(np.signbit(rows), places, axis=1)
    packed = [np.packbits(bits, axis=1, bitorder="little") for bits in (high, low, signs, larger)]
    return np.concatenate(packed, axis=1), _rounded(means)


def _means(sizes: Array, chosen: Array) -> Array:
    """Mean of the chosen values of each row, 0 where none is."""
    return np.where(chosen, sizes, 0).sum(1, dtype=np.float64) / np.maximum(1, chosen.sum(1))


def _rounded(means: Array) -> Array:
    """To the nearest bfloat16, as bits; too large a number becomes the largest."""
    bits = np.minimum(means, np.float64(np.finfo(np.float32).max)).astype(np.float32).view(np.uint32)
    return np.minimum((bits + np.uint32(0x8000)) >> np.uint32(16), np.uint32(0x7F7F)).astype(np.uint16)


def check_levels(levels: Array) -> None:
    """Raise `ValueError` where one, as its bits, is none that an encoder writes."""
    check_scales(levels)
    if (levels > NEGATIVE_ZERO).any():
        raise ValueError("a magnitude is negative")


def check_places(code: Array, count: int) -> None:
    """Raise `ValueError` where the places of a chunk of a part are none that an encoder writes. Compiled code."""
    found = native.library()
    assert found is not None
    if odd := found.crossfed_placed_check(count, native.address(code)):
        raise ValueError(NOT_SO_MANY if odd == 1 else NOT_INCREASING)


def decode(stored: dict[str, Array], count: int) -> Array:
    """`count` float32 values, 0 where none was sent. Raises `ValueError` where what is stored is odd."""
    check_levels(stored["level"])
    code, level = (np.ascontiguousarray(stored[suffix]) for suffix in ("code", "level"))
    if (found := native.library()) is not None:
        values = np.empty(count, np.float32)
        check_places(code, count)
        found.crossfed_placed_decode(count, *map(native.address, (code, level, values)))
        return values
    values = np.zeros(count, np.float32)
    levels = (level.astype(np.uint32) << 16).view(np.float32).reshape(-1, 2)
    at = 0
    for rows in chunks(values):  # views
        used = len(rows) * sum(streams_of(rows.shape[1]))
        _decode_rows(code[:used].reshape(len(rows), -1), levels[at : at + len(rows)], rows)
        code, at = code[used:], at + len(rows)
    return values


def _decode_rows(code: Array, levels: Array, rows: Array) -> None:
    """Fill chunks of zeros. Raises `ValueError` for places that no encoder writes."""
    count, kept = rows.shape[1], kept_of(rows.shape[1])
    ends = np.cumsum(streams_of(count))
    high, low, signs, larger = (
        np.unpackbits(code[:, end - size : end], axis=1, bitorder="little").view(bool)
        for end, size in zip(ends, streams_of(count), strict=True)
    )
    if (high.sum(1) != kept).any():
        raise ValueError(NOT_SO_MANY)
    upper = np.nonzero(high)[1].reshape(len(rows), kept) - np.arange(kept)
    lower = low[:, : LOW * kept].reshape(len(rows), kept, LOW) @ (1 << np.arange(LOW))
    places = (upper << LOW) + lower
    if (places >= count).any() or (np.diff(places, axis=1) <= 0).any():
        raise ValueError(NOT_INCREASING)
    sizes = np.where(larger[:, :kept], levels[:, 1:], levels[:, :1])
    np.put_along_axis(rows, places, np.where(signs[:, :kept], -sizes, sizes), axis=1)


CODEC = Codec(
    fields=fields,
    encode=encode,
    decode=decode,
    blocks=Blocks(kind="PLACED", numbers="code", scales="level", check=check_levels, check_numbers=check_places),
)
