"""Weights of updates by how much their facilities deliver: `rounds.late_weight: participation`, the default.

Where rounds do not wait, a fast facility delivers more updates than a slow one, and the model drifts towards its data.
The mean share of rounds in which facilities deliver over a facility's own share undoes that, as the debiasing of
partial reduce does for replicas (`facility.exchange.scheduling.groups`); FedNova (Wang et al. 2020, arXiv 2007.07481,
section 4) normalises unequal amounts of work in the same way.

Where steps are evened out (`rounds.steps`), a facility that takes more of them in every round moves its own update
further and counts for more tokens as well, so that a slow facility's data would be all but forgotten. What a facility
delivers is then its work, in rounds' work of its settings, so that over the rounds every facility's updates weigh as
its settings ask. A queue that is long now and short then evens out, and leaves each update its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean
from typing import Protocol

from coordinator.archive.rounds import RoundFile

LIMIT = 4.0
"""No factor is above this or below its inverse."""


class Done(Protocol):
    """What a facility says that it did in a round."""

    @property
    def steps(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def tokens(self) -> int: ...


def weight_of(done: Done, kind: str) -> float:
    """What an update weighs by what its facility says: `kind` is `tokens`, `samples` or `equal`."""
    return 1.0 if kind == "equal" else float(getattr(done, kind))


Work = Callable[[str, Done], float]
"""Of a facility's round, as a multiple of what its settings ask for."""


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


def work_in_a_delivery(history: Sequence[RoundFile], now: Mapping[str, Done], work: Work) -> dict[str, float]:
    """Mean work of each facility's updates, with those of the round that is being closed (`now`). That of an earlier
    round is what it was by the settings of its time, where its row says so."""
    found = {name: [work(name, one)] for name, one in now.items()}
    for entry in history:
        for row in entry.facilities:
            if row.status == "ok":
                found.setdefault(row.facility, []).append(row.work or work(row.facility, row))
    return {name: fmean(each) for name, each in found.items()}


def participation(shares: Mapping[str, float], now: Collection[str]) -> dict[str, float]:
    """Factor of each update in `now`: mean share over own share (`delivered`), within `LIMIT`."""
    mean = fmean(shares.values()) if shares else 1.0
    return {name: min(LIMIT, max(1 / LIMIT, mean / shares[name])) for name in now}
