"""What a person should know of a run, in StreamFlow's log and as an event of ours."""

from __future__ import annotations

import logging

from streamflow.log_handler import logger

from coordinator.events.event import emit


def tell(sentence: str, level: int = logging.WARNING) -> None:
    """Log the sentence, and emit it: the run's console and its notices show it."""
    logger.log(level, sentence)
    emit("problem", text=sentence)
