"""`changed`: the values that differ, and nothing is lost: the receiver's model has the sender's bits.

For models of which a round changes few values, as bfloat16 weights do after a sparse update. A value's change is the
difference of the whole numbers that the two models store for it: a few units in the last place are a small number in
any dtype, zeros of both signs and subnormals have their own, and adding it is exact, which a floating-point difference
is not where a value becomes much smaller.

Of a part, `size` holds the number of changed values, and the bytes of up to nine streams, which lie one after the other
in `data`, each compressed by deflate (RFC 1951). The first has the unchanged values before each changed one, a byte
each, of which 255 skips as many and ends nowhere. The others have the differences' first bytes, their second bytes
and so on, with the sign in the lowest bit (zigzag), up to the last that is not zero throughout.
"""

from __future__ import annotations

import zlib

import numpy as np

from facility.exchange.checkpoints.codecs import PART
from facility.exchange.checkpoints.floats import Array
from facility.exchange.delta_codecs import Codec, DeltaCodec, Selection

DECLARATION = DeltaCodec(
    name="changed",
    summary="the values that differ, exactly; its size is declared for 6 % of a bfloat16 model's values",
    implementation="CODEC",
    bytes_per_value=0.064,
    lossless=True,
)

SKIP = 255
"""A byte that skips so many values and ends at none."""
WIDEST = 8
"""Bytes of a difference."""
SIZES = 2 + WIDEST
"""Numbers of `size` for a part: changed values, bytes of the skips, bytes of each stream of the differences."""
STRATEGIES = (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE)
"""Random places and differences have nothing that repeats but runs; the shorter result is taken."""


def fields(elements: int, kept: int) -> list[tuple[str, str, int]]:
    """`kept`: bytes of all parts' streams."""
    return [("size", "I32", SIZES * -(-elements // PART)), ("data", "U8", kept)]


def encode(values: Array, limit: float = 0.0) -> dict[str, Array]:
    """`values`: differences of the stored whole numbers, signed, of one part; they wrap around."""
    places = np.flatnonzero(values)
    size = np.zeros(SIZES, np.int32)
    if not len(places):
        return {"size": size, "data": np.empty(0, np.uint8)}
    streams = [_deflated(plane) for plane in (_skips(places), *_planes(values[places]))]
    size[0] = len(places)
    size[1 : 1 + len(streams)] = [len(stream) for stream in streams]
    return {"size": size, "data": np.frombuffer(b"".join(streams), np.uint8)}


def decode(stored: dict[str, Array], count: int) -> Array:
    """Differences of the stored whole numbers, as int64."""
    values = np.zeros(count, np.int64)
    size, data = stored["size"], stored["data"]
    if len(data) != stored_bytes(stored, count):
        raise ValueError("the streams are not as long as their sizes say")
    changed = int(size[0])
    if not changed:
        return values
    ends = np.cumsum(size[1:], dtype=np.int64)
    streams = [data[end - length : end] for end, length in zip(ends, size[1:], strict=True) if length]
    places = _places(_inflated(streams[0], count), changed, count)
    folded = np.zeros((changed, WIDEST), np.uint8)
    for number, stream in enumerate(streams[1:]):
        plane = _inflated(stream, changed)
        if len(plane) != changed:
            raise ValueError("a stream has too few differences")
        folded[:, number] = plane
    if not folded[:, len(streams) - 2].any():
        raise ValueError("the last bytes of the differences are all zero")
    numbers = folded.view("<u8").reshape(-1).astype(np.uint64)
    if not numbers.all():
        raise ValueError("a difference is zero")
    values[places] = (numbers >> np.uint64(1)).view(np.int64) ^ -(numbers & np.uint64(1)).view(np.int64)
    return values


def selected_bytes(values: Array, limit: float) -> int:
    """Bytes of the streams of one part."""
    return len(encode(values)["data"])


def stored_bytes(stored: dict[str, Array], count: int) -> int:
    """Bytes of one part of `count` values, from its stored sizes. Raises `ValueError`."""
    changed, *lengths = stored["size"].tolist()
    filled = next((number for number, length in enumerate(lengths) if not length), len(lengths))
    if not 0 <= changed <= count or any(lengths[filled:]) or (filled < 2 if changed else filled):
        raise ValueError("the sizes are not of the changed values and their streams")
    if min(lengths) < 0 or max(lengths) > _longest(count):
        raise ValueError("a size is out of range")
    return sum(lengths)


def _longest(count: int) -> int:
    """Bytes of a compressed stream at most: none has more than one byte for each value of its part."""
    return count + (count >> 8) + 64


def _skips(places: Array) -> Array:
    """The bytes of the first stream for increasing places."""
    gaps = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(gaps // SKIP + 1)
    skips = np.full(ends[-1], SKIP, np.uint8)
    skips[ends - 1] = gaps % SKIP
    return skips


def _places(skips: Array, changed: int, count: int) -> Array:
    """What `_skips` was made from: `changed` places below `count`. Raises `ValueError`."""
    ends = skips != SKIP
    if np.count_nonzero(ends) != changed or not ends[-1]:
        raise ValueError("the places are not as many as the changed values")
    places: Array = np.cumsum(skips, dtype=np.int64)[ends] + np.arange(changed)
    if places[-1] >= count:
        raise ValueError("a place is past the end of the tensor")
    return places


def _planes(numbers: Array) -> list[Array]:
    """The differences, folded to positive numbers: their first bytes, their second bytes and so on."""
    numbers = numbers.astype(numbers.dtype.newbyteorder("<"))
    folded = (numbers << 1) ^ (numbers >> (8 * numbers.itemsize - 1))
    planes = list(folded.view(np.uint8).reshape(len(numbers), -1).T)
    while not planes[-1].any():
        planes.pop()
    return planes


def _deflated(plane: Array) -> bytes:
    found = []
    for strategy in STRATEGIES:
        stream = zlib.compressobj(wbits=-zlib.MAX_WBITS, strategy=strategy)
        found.append(stream.compress(plane.tobytes()) + stream.flush())
    return min(found, key=len)


def _inflated(content: Array, most: int) -> Array:
    """The bytes of a compressed stream, at most `most`. Raises `ValueError`."""
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        found = stream.decompress(content.tobytes(), most + 1)
    except zlib.error as error:
        raise ValueError(f"a stream cannot be decompressed: {error}") from None
    if not 0 < len(found) <= most or not stream.eof or stream.unused_data:
        raise ValueError("a stream does not have the bytes that it should")
    return np.frombuffer(found, np.uint8)


CODEC = Codec(
    fields=fields,
    encode=encode,
    decode=decode,
    selection=Selection(field="data", length=selected_bytes, stored_length=stored_bytes),
    of_bits=True,
)
