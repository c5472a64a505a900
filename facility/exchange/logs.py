"""Logging with one format in every command: to stderr, from $CROSSFED_LOG_LEVEL on, which started commands inherit.

What a command answers goes to stdout and is printed; everything that it reports on the way is logged.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from typing import Any

from facility.exchange.addresses import hidden_login

FORMAT, TIME = "%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"
VARIABLE = "CROSSFED_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")
OURS = ("facility", "coordinator")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
"""What moves a cursor or turns a line about; line ends and tabs are kept."""


def escape_controls(text: str) -> str:
    """Text for a terminal: what is in `CONTROL` is written as in Python's source."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class Printable(logging.Formatter):
    """Records hold words of others, such as settings and errors of libraries: none commands the terminal that shows
    the log, and no address in them shows a login, such as that of a site's tracker to whoever is sent a job's log."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(hidden_login(super().format(record)))


def log_level(default: str = "warning") -> str:
    """The level that the environment asks for, else `default`."""
    wanted = os.environ.get(VARIABLE, default).lower()
    return wanted if wanted in LEVELS else default


def configure_logging(level: str | None = None, *, default: str = "warning") -> None:
    """Log CrossFed's own messages from `level` on; without one, from $CROSSFED_LOG_LEVEL, else `default`.

    Other libraries keep their levels, but for one. A second call changes the level and adds no handler.
    """
    if level is not None:
        os.environ[VARIABLE] = level
    for name in OURS:
        logger = logging.getLogger(name)
        logger.setLevel(log_level(default).upper())
        if not logger.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(Printable(FORMAT, TIME))
            logger.addHandler(handler)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it warns of kernels that it lacks


class _SetLevel(argparse.Action):
    """Takes effect where it is read, so that mistakes in later options are logged alike."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        configure_logging(values or "info")


def add_log_options(parser: argparse.ArgumentParser) -> None:
    """`-v/--verbose` and `--log-level`, alike in every module command."""
    none = argparse.SUPPRESS
    parser.add_argument(
        "-v", "--verbose", action=_SetLevel, nargs=0, default=none, dest=none, help="short for --log-level info"
    )
    parser.add_argument(
        "--log-level",
        action=_SetLevel,
        choices=LEVELS,
        default=none,
        dest=none,
        help=f"least severe message to log (default: ${VARIABLE}, else the command's own)",
    )
