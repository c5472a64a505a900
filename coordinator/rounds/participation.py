"""Weights of updates by how often their facilities deliver: `rounds.late_weight: participation`, the default.

Where rounds do not wait, a fast facility delivers more updates than a slow one, and the model drifts towards its data.
The mean share of rounds in which facilities deliver over a facility's own share undoes that, as the debiasing of
partial reduce does for replicas (`facility.exchange.scheduling.groups`); FedNova (Wang et al. 2020, arXiv 2007.07481,
section 4) normalises unequal amounts of work in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

from coordinator.archive.rounds import RoundFile

LIMIT = 4.0
"""No factor is above this or below its inverse."""


def delivered(history: Sequence[RoundFile], now: Collection[str]) -> dict[str, float]:
    """The share of its rounds in which each facility has delivered, with the round that is being closed (`now`).

    Its rounds are those that name it, so that one that joins later is not weighed as if it had been slow before.
    """
    counts, rounds = dict.fromkeys(now, 1), dict.fromkeys(now, 1)
    waited_for = {row.facility for row in history[-1].facilities} if history else set()
    rounds |= dict.fromkeys(waited_for, 1)
    for entry in history:
        for row in entry.facilities:
            rounds[row.facility] = rounds.get(row.facility, 0) + 1
            if row.status == "ok":
                counts[row.facility] = counts.get(row.facility, 0) + 1
    return {name: count / rounds[name] for name, count in counts.items()}


def participation(shares: Mapping[str, float], now: Collection[str]) -> dict[str, float]:
    """Factor of each update in `now`: mean share over own share (`delivered`), within `LIMIT`."""
    mean = fmean(shares.values()) if shares else 1.0
    return {name: min(LIMIT, max(1 / LIMIT, mean / shares[name])) for name in now}
