"""When the rounds that are left are expected to be complete, by how long the last ones took."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from coordinator.archive.rounds import RoundFile

LATEST = 5
"""Rounds whose times count."""


def expected_end(last: Sequence[RoundFile], *, left: int, begun: float) -> tuple[float, float]:
    """When the round under way is expected to be complete, in seconds since 1970, and how many seconds those after it
    will take; 0 and 0 where none of the `last` rounds was timed, or none is left.

    `left`: rounds that are not complete; `begun`: when the one under way began.
    """
    timed = [entry.seconds for entry in last if entry.seconds > 0]
    each = statistics.median(timed) if timed else 0.0
    if not each or left <= 0:
        return 0.0, 0.0
    return begun + each, (left - 1) * each
