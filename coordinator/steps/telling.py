"""What a round is told to once it is in the archive: the coordinator's audit log, and the experiment trackers.

Old models are removed in between, which takes minutes on some file systems. A note says which round is still to be
told, so that the start after a kill does it: perhaps twice, never not at all.
"""

from __future__ import annotations

import logging

from coordinator.archive.audit import log_entry
from coordinator.archive.rounds import Archive, RoundFile
from coordinator.config.settings import CoordinatorSettings
from coordinator.events.event import emit
from coordinator.report.trackers import track_round

log = logging.getLogger(__name__)

UNTOLD = "untold"
"""Note of the archive: a round that is appended, and not told to all yet."""


def note_untold(archive: Archive, number: int) -> None:
    """Before the round is in the archive."""
    archive.write_note(UNTOLD, {"round": number})


def log_aggregated(entry: RoundFile) -> None:
    """Log the new model, the weights that it was made with, and who was left out."""
    log_entry(
        "aggregated",
        round=entry.round,
        model=entry.model_sha256,
        weights={row.facility: row.weight for row in entry.facilities if row.status == "ok"},
        left_out={row.facility: row.reason for row in entry.facilities if row.status != "ok"},
    )


def feed_trackers(archive: Archive, settings: CoordinatorSettings, entry: RoundFile) -> None:
    """Feed the experiment trackers with the curves of a round, after which nobody is left to be told of it."""
    for problem in track_round(archive.path, settings.federation, settings.trackers, entry):
        log.warning(problem)
        emit("problem", text=problem)
    archive.drop_note(UNTOLD)


def tell_untold(archive: Archive, settings: CoordinatorSettings) -> None:
    """Tell of the round that a killed coordinator had appended; one that it had not is made again, and told then."""
    number = archive.read_note(UNTOLD).get("round")
    if number in archive.rounds():
        entry = archive.read_round(number)
        log_aggregated(entry)
        feed_trackers(archive, settings, entry)
