"""Random numbers that depend on their key alone."""

from __future__ import annotations

import hashlib


def uniform_draw(*key: int | str) -> float:
    """A number in [0, 1) that depends on `key` alone (53 bits of a BLAKE2b digest)."""
    digest = hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
