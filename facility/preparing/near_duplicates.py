"""Documents that nearly repeat an earlier one, found by MinHash and locality-sensitive hashing.

The similarity of two documents is the Jaccard index of their shingles, runs of `SHINGLE` words. MinHash (Broder 1997,
"On the resemblance and containment of documents", section 4) estimates it as the share of equal numbers in two
signatures; the banding of signatures (Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", section 3.4) finds
candidates without comparing all pairs. Each candidate is confirmed by its signature. The first of several stays,
whatever split it is in: with --validation the training text is read first, so what is dropped of the validation text
is what training holds too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy
from numpy.typing import NDArray

SHINGLE = 5
"""Words of a shingle; a shorter document is one shingle."""
NUMBERS = 128
"""Of a signature: the estimate's standard error is at most 0.044."""
WORD = re.compile(r"\w+|[^\w\s]")
Signature = NDArray[numpy.uint32]


class NearDuplicates:
    """Remembers documents, 128 numbers of 32 bits and its bands for each."""

    def __init__(self, similarity: float, *, key: bytes = b"", elsewhere: Iterable[Signature] = ()) -> None:
        """`similarity`: from which on, in (0, 1], a document repeats an earlier one; 1: exact repetition only.

        `key`: of the signatures, at most 64 bytes; `elsewhere`: signatures of other facilities' documents, by the same
        key, which count as earlier ones.
        """
        self.similarity, self.key = similarity, key
        self.bands, self.rows = bands_of(similarity)
        self._signatures: list[Signature] = []
        self._buckets: list[dict[bytes, int | tuple[int, ...]]] = [{} for _ in range(self.bands)]
        """For each band, the documents that have its numbers; nearly always a single one."""
        self._exact: set[bytes] = set()
        for one in elsewhere:
            self._remember(one)
        self.elsewhere = len(self._signatures)
        """How many of the signatures are of other facilities; the others follow them."""

    def own(self) -> Iterator[NDArray[numpy.uint32]]:
        """Signatures of the documents that were kept here, in blocks of rows."""
        for at in range(self.elsewhere, len(self._signatures), 4096):
            yield numpy.array(self._signatures[at : at + 4096], dtype="<u4")

    def repeats(self, text: str) -> bool:
        """Whether the text repeats an earlier one; if not, it is remembered."""
        return self.earlier(text) is not None

    def earlier(self, text: str, *, remember: bool = True) -> Literal["here", "elsewhere"] | None:
        """Where the text is already; None where it was new. It is remembered then, unless it is not to be kept."""
        exact = exact_digest(text)
        if exact in self._exact:
            return "here"
        if self.similarity < 1:
            own = minhash_signature(text, self.key)
            for one in sorted(self._near(own)):
                if float((self._signatures[one] == own).mean()) >= self.similarity:
                    return "elsewhere" if one < self.elsewhere else "here"
            if remember:
                self._remember(own)
        if remember:
            self._exact.add(exact)
        return None

    def _bands(self, own: Signature) -> Iterator[tuple[dict[bytes, int | tuple[int, ...]], bytes]]:
        for number, bucket in enumerate(self._buckets):
            yield bucket, own[number * self.rows : (number + 1) * self.rows].tobytes()

    def _near(self, own: Signature) -> set[int]:
        """Documents that share a band."""
        found: set[int] = set()
        for bucket, key in self._bands(own):
            held = bucket.get(key, ())
            found.update((held,) if isinstance(held, int) else held)
        return found

    def _remember(self, own: Signature) -> None:
        number = len(self._signatures)
        for bucket, key in self._bands(own):
            held = bucket.get(key)
            bucket[key] = number if held is None else ((held,) if isinstance(held, int) else held) + (number,)
        self._signatures.append(own)


def exact_digest(text: str) -> bytes:
    """16 bytes that stand for a text, white space apart."""
    return hashlib.blake2b(" ".join(text.split()).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def shingles(text: str) -> set[bytes]:
    """Runs of words, case and white space apart."""
    words = WORD.findall(text.lower())
    last = max(1, len(words) - SHINGLE + 1)
    return {" ".join(words[i : i + SHINGLE]).encode("utf-8", "surrogatepass") for i in range(last)}


def _drawn() -> tuple[NDArray[numpy.uint64], NDArray[numpy.uint64]]:
    """Factors and offsets of the permutations, the same on every machine."""
    draw = numpy.random.Generator(numpy.random.PCG64(1))
    limit = 1 << 32
    return (
        draw.integers(1, limit, NUMBERS, dtype=numpy.uint64) | numpy.uint64(1),
        draw.integers(0, limit, NUMBERS, dtype=numpy.uint64),
    )


FACTORS, OFFSETS = _drawn()


def minhash_signature(text: str, key: bytes = b"") -> Signature:
    """The smallest value of every permutation over the text's shingles, which are hashed with `key`.

    Multiply-shift hashing (Dietzfelbinger et al. 1997): the upper half of factor x shingle + offset, modulo 2^64.
    """
    hashed = [int.from_bytes(hashlib.blake2b(one, digest_size=8, key=key).digest(), "little") for one in shingles(text)]
    values = numpy.array(sorted(hashed), dtype=numpy.uint64)
    least = numpy.full(NUMBERS, numpy.iinfo(numpy.uint32).max, dtype=numpy.uint32)
    shift = numpy.uint64(32)
    for first in range(0, len(values), 4096):  # 4 MiB at a time, however long the text is
        piece = values[first : first + 4096, None]
        mixed = ((piece ^ (piece >> shift)) * FACTORS + OFFSETS) >> shift
        least = numpy.minimum(least, mixed.min(axis=0).astype(numpy.uint32))
    return least


def bands_of(similarity: float) -> tuple[int, int]:
    """(bands, rows): as many rows a band as still find a pair of this similarity with probability 0.98."""
    for rows in range(NUMBERS // 2, 1, -1):
        bands = NUMBERS // rows
        if 1 - (1 - similarity**rows) ** bands >= 0.98:
            return bands, rows
    return NUMBERS, 1
