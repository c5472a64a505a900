"""Seeds derived from the federation's seed: the same inputs always train the same way."""

from __future__ import annotations

import hashlib

from facility.exchange.errors import ConfigurationError

LARGEST = 2**63 - 1
"""Generators differ in what they take; all take this."""


def check_seed(seed: int) -> None:
    """Raise `ConfigurationError` for a `--seed` that some generator of random numbers would refuse."""
    if not 0 <= seed <= LARGEST:
        raise ConfigurationError(f"--seed is {seed}, expected 0 or more, at most {LARGEST}")


def derive_seed(seed: int, *parts: int | str) -> int:
    """A seed in [0, 2**63) for this purpose, round, facility, step, ...: unrelated parts give unrelated seeds."""
    text = "/".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
