"""Scores on tasks that a facility was not asked for, of a round's model and of compared models alike."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.config.settings import CoordinatorSettings
from coordinator.events.event import emit

log = logging.getLogger(__name__)


def objection_to(
    settings: CoordinatorSettings, facility: str, scores: Sequence[Mapping[str, Any]], *, round: int, where: str
) -> str:
    """Why the scores that a facility reported in a round are left out; '' if they are not.

    The log and the run say it as well, after the words of `where`.
    """
    asked = settings.asked_tasks
    objection = "" if asked is None else asked.objection(facility, scores, round=round, rounds=settings.rounds)
    if objection:
        log.warning("%s: %s", where, objection)
        emit("problem", text=f"{where}: {objection}")
    return objection
