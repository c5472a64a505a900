"""Report a round that is in the archive to the coordinator's audit log and the experiment trackers.

Old models are removed in between, which takes minutes on some file systems. A note in the archive says which round is
still to be reported, so that the next start does it after a kill: at least once, perhaps twice.
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
"""Note of the archive: a round that is appended, and not reported everywhere yet."""


def note_unreported(archive: Archive, number: int) -> None:
    """Note, before the round is in the archive, that it is still to be reported."""
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
    """Feed the experiment trackers with the curves of a round, and drop the note: it is reported everywhere now."""
    for problem in track_round(archive.path, settings.federation, settings.trackers, entry):
        log.warning(problem)
        emit("problem", text=problem)
    archive.drop_note(UNTOLD)


def report_unreported(archive: Archive, settings: CoordinatorSettings) -> None:
    """Report the round that a killed coordinator had appended; one that it had not is made, and reported, again."""
    number = archive.read_note(UNTOLD).get("round")
    if number in archive.rounds():
        entry = archive.read_round(number)
        log_aggregated(entry)
        feed_trackers(archive, settings, entry)
