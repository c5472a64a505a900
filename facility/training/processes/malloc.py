"""What the C library does with memory that a process frees on a CPU."""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD = -3
"""glibc's number of the parameter (`mallopt(3)`)."""
THRESHOLD_BYTES = 2**20


def return_what_is_freed() -> bool:
    """Make glibc give allocations of 1 MiB and more back to the system when they are freed; False without glibc.

    By itself it raises the threshold to the largest size that was freed, up to 32 MiB, and keeps what is smaller for
    later. FSDP2 allocates and frees every block anew in each pass, beside gradients and moments that stay, so that
    pieces of the wrong size remain: a rank of a model of 27 M parameters grew to 1.7 times of what it held. The price
    is time, for the system clears every page that it gives.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, THRESHOLD_BYTES))
    except (OSError, AttributeError):
        return False
