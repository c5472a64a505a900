"""Weights of updates by how often their facilities deliver: `rounds.late_weight: participation`.

Where rounds do not wait, a fast facility delivers more updates than a slow one, and the model drifts towards its data.
The mean number of updates over a facility's own number undoes that, as the debiasing of partial reduce does for
replicas (`facility.exchange.scheduling.groups`); FedNova (Wang et al. 2020, arXiv 2007.07481, section 4) normalises
unequal amounts of work in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

from coordinator.archive.rounds import RoundFile

LIMIT = 4.0
"""No factor is above this or below its inverse."""


def delivered(history: Sequence[RoundFile], now: Collection[str]) -> dict[str, int]:
    """Updates of each facility that rounds have averaged, with those of the round that is being closed (`now`)."""
    counts: dict[str, int] = dict.fromkeys(now, 1)
    for entry in history:
        for row in entry.facilities:
            if row.status == "ok":
                counts[row.facility] = counts.get(row.facility, 0) + 1
    return counts


def participation(counts: Mapping[str, int], now: Collection[str]) -> dict[str, float]:
    """Factor of each update in `now`: mean count over own count, within `LIMIT`."""
    mean = fmean(counts.values()) if counts else 1.0
    return {name: min(LIMIT, max(1 / LIMIT, mean / counts[name])) for name in now}
