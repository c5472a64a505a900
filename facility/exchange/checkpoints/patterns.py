"""Which tensors are federated: glob patterns over names (`fnmatch`, case matters)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Patterns:
    """Tensors matching any of `include` (all when empty) and none of `exclude`."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def federated(self, name: str) -> bool:
        return _federated(self, name)


@functools.lru_cache(maxsize=100_000)
def _federated(patterns: Patterns, name: str) -> bool:
    included = not patterns.include or any(fnmatchcase(name, pattern) for pattern in patterns.include)
    return included and not any(fnmatchcase(name, pattern) for pattern in patterns.exclude)
