"""A command that is ended by a signal removes what it has half made."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""`timeout` and `kill`; a terminal that was closed."""


@contextmanager
def unwound_by_signals() -> Iterator[None]:
    """Within the block one of `SIGNALS`, unless it is ignored (`nohup`), raises `SystemExit` with a shell's code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for number, handler in before.items():
            if handler == signal.SIG_DFL:
                signal.signal(number, end)
        yield
    finally:
        for number, handler in before.items():
            if handler == signal.SIG_DFL:
                signal.signal(number, handler)
