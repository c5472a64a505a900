"""The trainer's log: Python's standard logging on stderr, one format, the first rank's messages and all warnings."""

from __future__ import annotations

import logging

from facility.exchange.logs import Printable, log_level
from facility.training.processes.ranks import Ranks

FORMAT = "%(asctime)s %(levelname)s [{name}] %(message)s"


def start_logging(ranks: Ranks, name: str, *, speaks: bool | None = None) -> None:
    """Log to stderr under `name`; ranks other than the one that reports (by default the first) log warnings only."""
    speaks = ranks.first if speaks is None else speaks
    process = name if speaks else f"{name} rank {ranks.rank}"
    handler = logging.StreamHandler()
    handler.setFormatter(Printable(FORMAT.format(name=process.replace("%", "%%")), datefmt="%H:%M:%S"))
    logger = logging.getLogger("facility")
    logger.handlers = [handler]
    usual = logging.INFO if speaks else logging.WARNING
    logger.setLevel(logging.DEBUG if log_level() == "debug" else usual)
    logger.propagate = False
