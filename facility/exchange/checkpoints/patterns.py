"""Which tensors are federated: glob patterns over names (`fnmatch`, case matters)."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether a tensor's name matches any of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Patterns:
    """Tensors matching any of `include` (all when empty) and none of `exclude`."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def federated(self, name: str) -> bool:
        return _federated(self, name)


@functools.lru_cache(maxsize=100_000)
def _federated(patterns: Patterns, name: str) -> bool:
    included = not patterns.include or matches_any(name, patterns.include)
    return included and not matches_any(name, patterns.exclude)
