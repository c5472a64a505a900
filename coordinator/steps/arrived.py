"""What the receive steps handed on: sound updates and failures, by facility; and the round that they are of."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.archive.rounds import Archive
from coordinator.config.settings import CoordinatorSettings
from facility.exchange.errors import InputError
from facility.exchange.messages.report import Failure, Report, read_failure, read_report
from facility.exchange.messages.strict_json import clean_text

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrived:
    """What the receive steps handed on."""

    updates: dict[str, Path]
    reports: dict[str, Report]
    failures: dict[str, Failure]
    scores: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the coordinator itself found of the received model on tasks."""
    dropped_updates: dict[str, Path] = dataclasses.field(default_factory=dict)
    """Updates that came and were left out since: what they cost was spent, and what came was sent."""
    dropped_reports: dict[str, Report] = dataclasses.field(default_factory=dict)
    """Theirs."""


@dataclasses.dataclass(kw_only=True)
class CollectedRound:
    """A round whose updates have come, as the steps that close it are given it."""

    archive: Archive
    settings: CoordinatorSettings
    model: Path
    """The global model that the round started from."""
    number: int
    arrived: Arrived

    def without(self, name: str, reason: str) -> CollectedRound:
        """The round without the update of one facility, which counts as failed with this reason."""
        return dataclasses.replace(self, arrived=drop(self.arrived, name, self.number, reason))


def sort_out(directories: Sequence[Path], facilities: Sequence[str] = (), number: int = 0) -> Arrived:
    """Split the received directories into sound updates and failures, by facility.

    The receive steps hand on one directory for each of `facilities`, in that order: whose a directory is follows from
    its place. One that cannot be read, or is not of the facility whose place it has, is that facility's failure.
    Without `facilities` the directories are taken at their word.
    """
    updates: dict[str, Path] = {}
    reports: dict[str, Report] = {}
    failures: dict[str, Failure] = {}
    in_order = bool(facilities) and len(directories) == len(facilities)
    for place, directory in enumerate(directories):
        known = facilities[place] if in_order else None
        try:
            message = read_failure(directory) or read_report(directory)
            name = message.facility
            if (facilities and name not in facilities) or (known is not None and name != known):
                raise InputError(f"{directory} is of facility {name!r}, expected {known or 'one of the federation'!r}")
        except Exception as error:
            if known is None:
                log.warning("an update cannot be read and is left out: %s", clean_text(str(error)))
                continue
            reason = f"what was received of it cannot be read: {clean_text(str(error), 300)}"
            failures[known] = Failure(facility=known, round=number, reason=reason, kind="refused")
            continue
        if isinstance(message, Failure):
            failures[name] = message
        else:
            updates[name], reports[name] = directory, message
    return Arrived(updates=updates, reports=reports, failures=failures)


def drop(arrived: Arrived, name: str, number: int, reason: str) -> Arrived:
    """What arrived without the update of one facility, which counts as failed with this reason."""
    failure = Failure(facility=name, round=number, reason=clean_text(reason), kind="refused")
    updates, reports = dict(arrived.updates), dict(arrived.reports)
    update, report = updates.pop(name, None), reports.pop(name, None)
    return dataclasses.replace(
        arrived,
        updates=updates,
        reports=reports,
        failures=arrived.failures | {name: failure},
        dropped_updates=arrived.dropped_updates | ({} if update is None else {name: update}),
        dropped_reports=arrived.dropped_reports | ({} if report is None else {name: report}),
    )
