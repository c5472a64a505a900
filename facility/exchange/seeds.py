"""Seeds derived from the federation's seed: the same inputs always train the same way."""

from __future__ import annotations

import hashlib


def derive(seed: int, *parts: int | str) -> int:
    """A seed in [0, 2**63) for this purpose, round, facility, step, ...: unrelated parts give unrelated seeds."""
    text = "/".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
