"""How many steps the training of a round takes here, decided once by a job's first task and read by the others."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from facility.exchange.files.durable import write_json
from facility.exchange.json_values import note_in
from facility.exchange.messages.manifest import Manifest
from facility.exchange.messages.settings import FacilitySettings
from facility.exchange.messages.steps import end_asked, steps_asked

log = logging.getLogger(__name__)

NAME = "steps.json"
"""In the facility's state: the steps of the round at work where they depend on when its job began, and what its latest
jobs took beside training."""
LATEST = 5
"""Jobs that count."""


def decide_steps(
    state: Path, settings: FacilitySettings, received: Manifest, round: int, *, limit: float = 0.0
) -> float | None:
    """Decide how many steps a round takes that is to end at a stated time; returns when, in seconds since 1970.

    `limit`: seconds that the job may still take, in which its steps are to fit as well, since a job that is cut off
    waits in its queue once more; 0: nothing says.

    None where nothing is to be decided or an earlier job of the round has: a round that goes on after a pause or a
    requeue keeps the steps with which it began, and every task of a job reads the same number.
    """
    end = end_asked(received, settings.facility, most=settings.most_steps)
    if end is None or _decided(state, received, round) is not None:
        return None
    now = time.time()
    known = _beside(state)
    beside = median(known) if known else end.beside
    steps = end.steps_from(now, beside)
    if limit and (fit := replace(end, time=now + limit).steps_from(now, beside)) < steps:
        log.info("round %d: %d steps fit until its end, %d into what is left of the job's time", round, steps, fit)
        steps = fit
    state.mkdir(parents=True, exist_ok=True)
    write_json(state / NAME, {"round": round, "model": received.content_sha256, "steps": steps, "beside": known})
    log.info(
        "round %d takes %d steps of %.3g s: it is to end in %.0f s, of which %.0f s go beside training (%d to %d steps "
        "are allowed)",
        *(round, steps, end.seconds_per_step, end.time - now, beside, end.least, end.most),
    )
    return now


def remember_beside(state: Path, seconds: float) -> None:
    """Keep how long a job took from its decision to its update beside training, for the decisions to come."""
    kept = _read(state)
    if kept:
        write_json(state / NAME, kept | {"beside": [*_beside(state), max(0.0, seconds)][-LATEST:]})


def steps_of(state: Path, settings: FacilitySettings, received: Manifest, round: int) -> int | None:
    """Steps of the round; None: those of the settings."""
    if end_asked(received, settings.facility, most=settings.most_steps) is not None:
        return _decided(state, received, round)
    return steps_asked(received, settings.facility, most=settings.most_steps)


def _decided(state: Path, received: Manifest, round: int) -> int | None:
    kept = _read(state)
    same = (kept.get("round"), kept.get("model")) == (round, received.content_sha256)
    return int(kept["steps"]) if same else None


def _beside(state: Path) -> list[float]:
    return [float(one) for one in _read(state).get("beside", [])]


def _read(state: Path) -> dict[str, Any]:
    content = note_in(state / NAME)
    return content if isinstance(content, dict) else {}
