"""How many steps the training of a round takes here, decided once by a job's first task and read by the others."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from facility.exchange.files.durable import write_json
from facility.exchange.messages.manifest import Manifest
from facility.exchange.messages.settings import FacilitySettings
from facility.exchange.messages.steps import end_asked, steps_asked

log = logging.getLogger(__name__)

NAME = "steps.json"
"""In the facility's state: the steps of the round at work where they depend on when its job began."""


def decide_steps(state: Path, settings: FacilitySettings, received: Manifest, round: int) -> None:
    """Decide how many steps a round takes that is to end at a stated time, unless an earlier job of it has.

    A round that goes on after a pause or a requeue thus keeps the steps with which it began, and every task of a job
    reads the same number.
    """
    end = end_asked(received, settings.facility, most=settings.most_steps)
    if end is None or _decided(state, received, round) is not None:
        return
    now = time.time()
    steps = end.steps_from(now)
    state.mkdir(parents=True, exist_ok=True)
    write_json(state / NAME, {"round": round, "model": received.content_sha256, "steps": steps})
    log.info(
        "round %d takes %d steps of %.3g s: the round is expected to end in %.0f s (%d to %d are allowed)",
        *(round, steps, end.seconds_per_step, end.time - now, end.least, end.most),
    )


def steps_of(state: Path, settings: FacilitySettings, received: Manifest, round: int) -> int | None:
    """Steps of the round; None: those of the settings."""
    if end_asked(received, settings.facility, most=settings.most_steps) is not None:
        return _decided(state, received, round)
    return steps_asked(received, settings.facility, most=settings.most_steps)


def _decided(state: Path, received: Manifest, round: int) -> int | None:
    try:
        told = json.loads((state / NAME).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(told, dict) or (told.get("round"), told.get("model")) != (round, received.content_sha256):
        return None
    return int(told["steps"])
