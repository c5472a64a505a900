"""Logging with one format in every command: to stderr, from $CROSSFED_LOG_LEVEL on, which started commands inherit."""

from __future__ import annotations

import logging
import os
import sys

FORMAT, TIME = "%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"
VARIABLE = "CROSSFED_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")
OURS = ("facility", "coordinator")


def configure_logging(level: str | None = None) -> None:
    """Log CrossFed's own messages from `level` on (default: $CROSSFED_LOG_LEVEL, then `warning`).

    Other libraries keep their levels. A second call changes the level and adds no handler.
    """
    if level is not None:
        os.environ[VARIABLE] = level
    wanted = os.environ.get(VARIABLE, "warning").lower()
    for name in OURS:
        logger = logging.getLogger(name)
        logger.setLevel((wanted if wanted in LEVELS else "warning").upper())
        if not logger.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter(FORMAT, TIME))
            logger.addHandler(handler)
