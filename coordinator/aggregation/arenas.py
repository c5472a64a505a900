"""glibc's arenas: by default every thread allocates from one of its own, and what it frees there no other can use."""

from __future__ import annotations

import ctypes

M_ARENA_MAX = -8
"""glibc's number of the parameter (`mallopt(3)`)."""


def share_one_arena() -> bool:
    """Let threads that have not allocated yet use the process's first arena; says whether the C library could.

    The threads of an aggregation allocate little and rarely; 3 MB lay free in their arenas.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1))
    except (AttributeError, OSError):  # another C library
        return False
