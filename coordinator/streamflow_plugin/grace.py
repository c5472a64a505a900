"""How long a round stays open after its quorum: a pure function of how long the facilities took before.

Closing earlier makes rounds shorter, but a facility that is late delivers only in every n-th round, n = ceil(its time /
the round's), and its update counts (1 + n - 1) ** -a of its weight (FedBuff: Nguyen et al. 2022, arXiv 2106.06581,
section 5, a = 1/2). In the steady state the useful work a second is

    sum_f weight_f n_f ** -a / n_f / (seconds of a round).

Of the waits that some round has seen, the one that maximises it is chosen, the way FedCompass (Li et al. 2024, arXiv
2309.14675) sets the wait of a group from measured speeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

LEARNING_ROUNDS = 2
"""Rounds that wait for all, so that every facility has been timed."""
WINDOW = 8
"""Latest rounds that count."""


def seconds_of_round(seconds: Sequence[float], quorum: int, grace: float) -> float:
    """When a round closes in which the facilities need so long: after the quorum and the grace, or with the last."""
    return min(max(seconds), sorted(seconds)[quorum - 1] + grace)


def useful_rate(
    rounds: Sequence[Mapping[str, float]], quorum: int, grace: float, *, exponent: float, weights: Mapping[str, float]
) -> float:
    """Useful weight a second, the mean over the rounds seen: seconds by facility, of each round."""
    rates = []
    for seconds in rounds:
        closes = seconds_of_round(list(seconds.values()), min(quorum, len(seconds)), grace)
        useful = 0.0
        for name, needed in seconds.items():
            every = max(1, math.ceil(needed / closes - 1e-9)) if closes else 1
            useful += weights.get(name, 1.0) * every**-exponent / every
        rates.append(useful / max(closes, 1e-9))
    return fmean(rates)


def usual_quorum(rounds: Sequence[Mapping[str, float]], quorum: int) -> float:
    """When in a round the quorum usually has delivered, of facilities that all begin with it; 0 where none was seen."""
    seen = [sorted(one.values()) for one in rounds if one][-WINDOW:]
    return median(seconds[min(quorum, len(seconds)) - 1] for seconds in seen) if seen else 0.0


def best_grace(
    rounds: Sequence[Mapping[str, float]],
    quorum: int,
    *,
    exponent: float = 0.5,
    weights: Mapping[str, float] | None = None,
) -> float:
    """Seconds to wait after the quorum; `inf`, to wait for all, until `LEARNING_ROUNDS` rounds have been seen.

    Candidates are no wait at all and the waits after which some facility delivered in some round: the best of these,
    not of every number. Of equal ones the longest counts, since an update in time is worth more than the same rate of
    late ones.
    """
    seen = [one for one in rounds if one][-WINDOW:]
    if len(seen) < LEARNING_ROUNDS:
        return math.inf
    candidates = {0.0}
    for seconds in seen:
        ordered = sorted(seconds.values())
        at = ordered[min(quorum, len(ordered)) - 1]
        candidates |= {later - at for later in ordered if later > at}
    rates = {grace: useful_rate(seen, quorum, grace, exponent=exponent, weights=weights or {}) for grace in candidates}
    most = max(rates.values())
    return max(grace for grace, rate in rates.items() if rate >= most * (1 - 1e-9))
