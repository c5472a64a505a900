"""Child processes that end with their parent."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def end_with_parent(number: signal.Signals) -> None:
    """Ask Linux to send this process a signal when its parent dies, however it dies (prctl(2)). For `preexec_fn`."""
    _LIBC.prctl(PR_SET_PDEATHSIG, number)
