"""How much of a federation's weight is present in a round: `aggregation.incomplete_rate`.

The mean of the updates that are there moves the model by a whole step towards these facilities' data, and a server
momentum carries it on for rounds: with one of two facilities absent in every third round that led away from the
other's. Multiplied by the present share, an update moves the model as far as if those that are absent had not moved,
and the momentum by as much less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from coordinator.aggregation.settings import AggregationSettings
from coordinator.archive.rounds import RoundFile
from coordinator.rounds.participation import weight_of
from facility.exchange.masking.weights import cap_weights

WINDOW = 5
"""A facility that has missed so many rounds in a row, this one with them, is no longer waited for."""


def present_share(
    history: Sequence[RoundFile], now: Mapping[str, float], facilities: Sequence[str], settings: AggregationSettings
) -> float:
    """The weights of the updates of this round (`now`) over those of all facilities that are expected, at most 1.

    An absent facility weighs what its last update did; one without any, the mean of the others. No facility's part of
    the whole is more than `maximum_share`, where that holds for updates. Nor does an absent one of two take more than
    that by what it claimed: one that claims much and stays away would stop the other.
    """
    absent = [name for name in facilities if name not in now and _expected(name, history)]
    if not absent or not now:
        return 1.0
    known = {name: weight for name in absent if (weight := _last_weight(name, history, settings)) > 0}
    usual = fmean([*now.values(), *known.values()])
    weights = dict(now) | {name: known.get(name, usual) for name in absent}
    names, total = sorted(weights), math.fsum(weights.values())
    if not total:  # updates of no weight are refused
        return 1.0
    shares = [weights[name] / total for name in names]
    if len(names) >= settings.screen.minimum_updates and max(shares) > settings.maximum_share:
        shares = cap_weights(shares, settings.maximum_share)
    present = math.fsum(share for name, share in zip(names, shares, strict=True) if name in now)
    claimed = not isinstance(settings.weights, dict)
    return min(1.0, max(present, 1.0 - len(absent) * settings.maximum_share) if claimed else present)


def _expected(name: str, history: Sequence[RoundFile]) -> bool:
    """Whether an absent facility has delivered lately, or has not had the rounds to."""
    rows = [row for entry in history for row in entry.facilities if row.facility == name][-(WINDOW - 1) :]
    return len(rows) < WINDOW - 1 or any(row.status == "ok" for row in rows)


def _last_weight(name: str, history: Sequence[RoundFile], settings: AggregationSettings) -> float:
    """What a facility's last update weighed; 0: it has none."""
    kind = settings.weights
    if isinstance(kind, dict):
        return kind.get(name, 0.0)
    rows = (row for entry in reversed(history) for row in entry.facilities)
    return next((weight_of(row, kind) for row in rows if row.facility == name and row.status == "ok"), 0.0)
