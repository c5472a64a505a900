"""What the C library does with memory that a process frees on a CPU: glibc's `mallopt(3)`, nothing elsewhere."""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
"""glibc's numbers of the parameters."""
THRESHOLD_BYTES = 2**20


def return_what_is_freed() -> bool:
    """Make glibc give allocations of 1 MiB and more back to the system when they are freed; False without glibc.

    By itself it raises the threshold to the largest size that was freed, up to 32 MiB, and keeps what is smaller for
    later. FSDP2 allocates and frees every block anew in each pass, beside gradients and moments that stay, so that
    pieces of the wrong size remain: a rank of a model of 27 M parameters grew to 1.7 times of what it held. The price
    is time, for the system clears every page that it gives.
    """
    return _set(M_MMAP_THRESHOLD, THRESHOLD_BYTES)


def share_one_arena() -> bool:
    """Let threads that have not allocated yet use the process's first arena; False without glibc.

    By default every thread allocates from an arena of its own, and what it frees there no other can use. The threads of
    an aggregation allocate little and rarely; 3 MB lay free in their arenas.
    """
    return _set(M_ARENA_MAX, 1)


def _set(parameter: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(parameter, value))
    except (OSError, AttributeError):  # another C library
        return False
