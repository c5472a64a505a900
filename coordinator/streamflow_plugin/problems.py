"""What a person should know of a run, in StreamFlow's log and as an event of ours."""

from __future__ import annotations

import logging

from streamflow.log_handler import logger

from coordinator.events.event import emit


def report_problem(sentence: str, level: int = logging.WARNING) -> None:
    """Log the sentence, and emit it: the run's console and its notices show it."""
    logger.log(level, sentence)
    emit("problem", text=sentence)


LOGIN, ROUND = "login", "round"
"""Who finds a facility away: a connection to it, or a round that cannot begin there."""
_away: dict[str, set[str]] = {}
"""By facility: who finds it away now."""


def report_away(facility: str, reason: str, by: str) -> None:
    """Log and emit that a facility does not answer: once while it lasts, whoever finds it first."""
    if facility not in _away:
        logger.warning(f"{facility} does not answer ({reason}): it is tried again")
        emit("away", facility=facility, reason=reason)
    _away.setdefault(facility, set()).add(by)


def report_back(facility: str, by: str) -> None:
    """Log and emit that it answers, once all who found it away have got through."""
    found = _away.get(facility, set())
    found.discard(by)
    if facility in _away and not found:
        del _away[facility]
        logger.info(f"{facility} answers again")
        emit("back", facility=facility)
