"""What the engine logs during `crossfed run`, on the console of a person: the time and a sentence, nothing else."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from coordinator.archive.summary import shown

ENGINE = "coordinator.engine"
"""Name of the logger of all that goes to a run's console."""


class ConsoleHandler(logging.Handler):
    """Prints messages above a live display; control characters of facilities are taken out."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        self.console.print(f"{moment} {shown(record.getMessage())}", markup=False, highlight=False)


@contextmanager
def shown_on(console: Console) -> Iterator[None]:
    """Within the block the engine's messages, from `info` on, go to `console` and nowhere else."""
    logger = logging.getLogger(ENGINE)
    handler, level = ConsoleHandler(console), logger.level
    logger.addHandler(handler)
    logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = True
