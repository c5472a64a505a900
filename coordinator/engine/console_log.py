"""What the engine logs during `crossfed run`, on the operator's console: the time and a sentence, nothing else.

A console that takes no more ends no run: its reader may be gone (`crossfed run | tee log`, a terminal that was
closed), or the disk full that it is written to.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from rich.console import Console

from coordinator.console import command_console
from coordinator.shown_text import safe_line

ENGINE = "coordinator.engine"
"""Name of the logger of all that goes to a run's console."""
QUIET_SECONDS = 30.0
"""A console without a display says after so long without a line what the run waits for."""
GONE = (errno.EPIPE, errno.EIO)
"""Errors of a stream that nobody reads any more."""


class Lasting:
    """A stream of text that never fails: what cannot be written is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(ValueError):  # it was closed
            try:
                return self._stream.write(text)
            except OSError as error:
                self._silence(error)
        return len(text)

    def flush(self) -> None:
        with suppress(ValueError):
            try:
                self._stream.flush()
            except OSError as error:
                self._silence(error)

    def _silence(self, error: OSError) -> None:
        """Let what is still held back, and all that follows, go nowhere where the reader is gone."""
        if error.errno in GONE:
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lasting_console() -> Console:
    """The console of a run: what it cannot print does not end the run."""
    return command_console(140, cast(TextIO, Lasting(sys.stdout)))


class ConsoleHandler(logging.Handler):
    """Prints messages above a live display; control characters of facilities are taken out."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.console, self.clock, self.said = console, clock, clock()

    def say_if_quiet(self, sentence: Callable[[], str]) -> None:
        """Print what is now, where nothing was printed for `QUIET_SECONDS`."""
        if self.clock() - self.said >= QUIET_SECONDS:
            logging.getLogger(ENGINE).info("%s", sentence())

    def emit(self, record: logging.LogRecord) -> None:
        self.said = self.clock()
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        self.console.print(f"{moment} {safe_line(record.getMessage())}", markup=False, highlight=False)


@contextmanager
def shown_on(handler: ConsoleHandler) -> Iterator[None]:
    """Within the block the engine's messages, from `info` on, go to this console and nowhere else."""
    logger = logging.getLogger(ENGINE)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = True
