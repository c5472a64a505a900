"""What an aggregated round settles for the next: its steps, and whether deadline and node-hours leave room for it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from coordinator.archive.journal import Journal
from coordinator.archive.rounds import Archive, RoundFile
from coordinator.config.settings import CoordinatorSettings
from coordinator.steps.decide import Decision
from coordinator.steps.elastic import ends_ahead
from coordinator.steps.even import steps_ahead
from coordinator.steps.limits import Exceeded, exceeded_in
from facility.exchange.messages.manifest import read_manifest, with_extra
from facility.exchange.messages.privacy import RELEASED
from facility.exchange.messages.steps import ENDS
from facility.exchange.messages.steps import KEY as STEPS


def asks_ahead(
    archive: Archive, settings: CoordinatorSettings, history: Sequence[RoundFile], directory: Path
) -> RoundFile:
    """Say in the new model how many steps each facility is to take, or until when, where steps are evened out.

    Returns the last round of `history`, which made that model, with what was said.
    """
    *_, round_file = history
    if settings.even is None:
        return round_file
    entries = Journal(archive.path).read()
    ahead = steps_ahead(settings.even, settings.steps, history, entries)
    ends = ends_ahead(settings.even, settings.steps, history, entries)
    for name in ("model", "message"):
        if (directory / name).is_dir():
            with_extra(directory / name, STEPS, ahead.steps)
            if ends is not None:
                with_extra(directory / name, ENDS, ends.by_facility(time.time()))
    seconds = 0.0 if ends is None else round(ends.seconds, 3)
    return dataclasses.replace(round_file, next_steps=ahead.steps, next_steps_reason=ahead.reason, next_end=seconds)


def write_released_steps(history: Sequence[RoundFile], directory: Path) -> None:
    """Say in the new model how many noised steps each facility has reported: one whose ledger holds fewer, for it was
    restored from a backup, would spend its privacy budget again."""
    reported: dict[str, int] = {}
    for row in (row for entry in history for row in entry.facilities if row.privacy):
        reported[row.facility] = max(reported.get(row.facility, 0), row.privacy["steps"])
    for name in ("model", "message"):
        if reported and (directory / name).is_dir():
            with_extra(directory / name, RELEASED, reported)


def ends_anew(archive: Archive, settings: CoordinatorSettings) -> None:
    """Say in the newest model until when its round trains: as a run begins, or as the round is asked for again.

    What it says counts from when the model was made, and jobs would find little of that time left. Where steps are no
    longer elastic it says nothing.
    """
    history = archive.history()
    if not history:
        return
    even = settings.even
    ends = None if even is None else ends_ahead(even, settings.steps, history, Journal(archive.path).read())
    directory = archive.round_directory(history[-1].round)
    for path in (directory / "model", directory / "message"):
        if path.is_dir() and (ends is not None or ENDS in read_manifest(path).extra):
            with_extra(path, ENDS, {} if ends is None else ends.by_facility(time.time()))


def within_limits(
    archive: Archive, settings: CoordinatorSettings, history: Sequence[RoundFile], decision: Decision, now: float
) -> tuple[RoundFile, Decision, Exceeded | None]:
    """The last round of `history` and the decision as given, or the end where another round is expected to exceed
    deadline or node-hours."""
    *_, round_file = history
    if settings.limits is None or not decision.proceed:
        return round_file, decision, None
    found = exceeded_in(archive, settings, history, now)
    if found is None:
        return round_file, decision, None
    ended = dataclasses.replace(round_file, decision=found.reason, ended=True)
    return ended, Decision(proceed=False, reason=found.reason), found
