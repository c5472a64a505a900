"""A bound of time and memory on what runs by a published file's own rules: a chat template may loop for ever."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SECONDS = 60.0
"""Of this process's own computing; a conversation takes less than a thousandth."""
BYTES = 1 << 30
"""More than the process has."""


class TooMuch(Exception):
    """A bound was reached."""


@contextmanager
def bounded_resources() -> Iterator[None]:
    """Raise `TooMuch` within, after `SECONDS` of computing, or where `BYTES` more than there are now are asked for.

    Time is bounded in a process's main thread alone, where Python hands signals on.
    """
    timed = threading.current_thread() is threading.main_thread()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = _size() + BYTES
    before = signal.signal(signal.SIGVTALRM, _over) if timed else None
    try:
        if soft == resource.RLIM_INFINITY or wanted < soft:
            resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, 1.0)
        yield
    except MemoryError:
        raise TooMuch(f"it takes more than {BYTES >> 20} MiB") from None
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _over(number: int, frame: FrameType | None) -> NoReturn:
    raise TooMuch("it computes without an end")


def _size() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read(100).split()[0]) * resource.getpagesize()
