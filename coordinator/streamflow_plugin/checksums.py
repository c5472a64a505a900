"""Hash a file once, though many directories hold it: the model of a round is linked into one for every facility.

StreamFlow takes the SHA-1 of every file of a directory that a step on this machine leaves or passes on. Hard links of
one file have one inode; what was hashed under another name with the same size and time of writing is not read again.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable

LEAST_BYTES = 1 << 20
"""Smaller files are hashed anew: that costs less than a mistake about the clock's ticks could."""
MOST_FILES = 4096


class KnownChecksums:
    """What this process has hashed, by the file itself and not by its name."""

    def __init__(self, original: Callable[[str], str]) -> None:
        self._original = original
        self._known: OrderedDict[tuple[int, ...], str] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, path: str) -> str:
        before = _identity(path)
        with self._lock:
            if (known := self._known.get(before)) is not None:
                self._known.move_to_end(before)
                return known
        found = self._original(path)
        if before[2] >= LEAST_BYTES and _identity(path) == before:
            with self._lock:
                self._known[before] = found
                while len(self._known) > MOST_FILES:
                    self._known.popitem(last=False)
        return found


def _identity(path: str) -> tuple[int, ...]:
    """Not its ctime, which a further link changes."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
