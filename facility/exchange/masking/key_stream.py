"""AES-256 in counter mode (NIST SP 800-38A, section 6.5), by the faster of two implementations of the same stream.

From its third block on it is what Galois/counter mode encrypts with under a nonce of zeros (SP 800-38D, section 7.1:
the first counter is two more than the nonce's). Where a processor has AES over vectors of 512 bits, OpenSSL uses them
for Galois/counter mode alone, at twice the speed; elsewhere that mode is slower, for it authenticates as well.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

BLOCK = 16
"""Bytes of a cipher block."""
HEAD = 2 * BLOCK
"""Bytes of a stream that Galois/counter mode does not give."""
GALOIS_ENDS = BLOCK << 32
"""Byte of a stream at which Galois/counter mode begins again: its counter has 32 bits."""
COUNTER_ENDS = BLOCK << 128
MOST_SKIPPED = 64 * BLOCK
"""Bytes between two reads that are cheaper to make than a cipher is."""
TRIED_BYTES, TRIALS = 1 << 16, 3


class KeyStream:
    """The stream of one seed, read in pieces: one that follows the last needs no new cipher."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._cipher: Any = None
        self._at, self._end = -1, 0
        """Byte that the cipher is at, and the one that it must not go beyond."""

    def write(self, space: memoryview, begin: int, zeros: memoryview) -> None:
        """Write as many bytes of the stream as there are `zeros`, from byte `begin` on, to the head of `space`.

        `space`: a block longer than `zeros`.
        """
        end, done = begin + len(zeros), 0
        if begin == 0 and HEAD < end <= GALOIS_ENDS and galois_is_faster():
            space[:HEAD] = _counter_mode(self._seed, 0).update(bytes(HEAD))
            self._cipher, self._end, done = _galois(self._seed), GALOIS_ENDS, HEAD
        elif not 0 <= begin - self._at <= MOST_SKIPPED or self._at < 0 or end > self._end:
            first, skipped = divmod(begin, BLOCK)
            self._cipher, self._end = _counter_mode(self._seed, first), COUNTER_ENDS
            self._cipher.update(bytes(skipped))
        elif begin > self._at:
            self._cipher.update(bytes(begin - self._at))
        self._cipher.update_into(zeros[done:], space[done:])
        self._at = end


@lru_cache(maxsize=1)
def galois_is_faster() -> bool:
    """Whether Galois/counter mode gives the stream faster on this processor; tried once, in less than a millisecond."""
    zeros, space = memoryview(bytes(TRIED_BYTES)), memoryview(bytearray(TRIED_BYTES + BLOCK))
    seed = bytes(32)

    def seconds(cipher: Any) -> float:
        found = []
        for _ in range(TRIALS):
            begun = time.perf_counter()
            cipher.update_into(zeros, space)
            found.append(time.perf_counter() - begun)
        return min(found)

    return seconds(_galois(seed)) < seconds(_counter_mode(seed, 0))


def _counter_mode(seed: bytes, first: int) -> Any:
    """The cipher from block `first` on."""
    from cryptography.hazmat.primitives.ciphers import Cipher  # 6 MB that an aggregation without masks does not need
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    return Cipher(AES(seed), CTR(first.to_bytes(BLOCK, "big"))).encryptor()


def _galois(seed: bytes) -> Any:
    """The cipher from block 2 on."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    return Cipher(AES(seed), GCM(bytes(12))).encryptor()
