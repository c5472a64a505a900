"""Whether rounds that do not wait keep enough models for the updates that will come late."""

from __future__ import annotations

from coordinator.config.closing import carries_late
from coordinator.config.federation import Federation
from coordinator.engine.render import most_rounds_behind
from coordinator.preflight.row import Row, ok, warning


def check_waiting(federation: Federation) -> list[Row]:
    """One row where late updates are carried, else none.

    With n facilities that are alike and a quorum of q, every round averages q updates and a job spans n / q rounds.
    """
    closing, facilities = federation.closing, len(federation.facilities)
    if closing is None or not carries_late(closing):
        return []
    usual, most = -(-facilities // closing.needed(facilities)) - 1, most_rounds_behind(federation)
    found = (
        f"rounds close after {closing.needed(facilities)} of {facilities} facilities; an update counts up to {most} "
        f"rounds late (keep_rounds), and is about {usual} late where all facilities are alike"
    )
    if closing.grace == 0 and most < usual:
        fix = f"rounds will wait for updates that would be later; to avoid that, set keep_rounds to {usual + 1} or more"
        return [warning("federation", "waiting", found, fix)]
    return [ok("federation", "waiting", found)]
