"""How long a round stays open after its quorum: a pure function of how long the facilities took before.

Closing earlier makes rounds shorter, but what is late counts (1 + s) ** -a of its weight, s rounds late (FedBuff:
Nguyen et al. 2022, arXiv 2106.06581, section 5, a = 1/2). FedCompass (Li et al. 2024, arXiv 2309.14675) sets the wait
of a group from measured speeds; where queues and not machines make a facility late, one speed of each does not foretell
which will be late next. So the rounds to come are played through: every job takes as long as one that its facility had
lately, drawn with a fixed seed (B. Efron 1979, "Bootstrap methods", Annals of Statistics 7), the same draws for every
candidate, under the rules by which rounds close. The wait that brought most useful weight a second is chosen.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from statistics import median

LEARNING_ROUNDS = 2
"""Rounds that wait for all, so that every facility has been timed."""
WINDOW = 8
"""Latest rounds that count."""
AHEAD = 48
"""Rounds that are played through."""
MOST_CANDIDATES = 8
MARGIN = 0.02
"""Share by which a shorter wait must be better than a longer one: what the draws leave uncertain."""
LEEWAY = 0.1
"""Share by which a wait is longer than one that was seen, where what comes a moment later is discarded."""

Draws = Mapping[str, Sequence[float]]
"""By facility, the seconds of its jobs to come."""


def usual_quorum(rounds: Sequence[Mapping[str, float]], quorum: int) -> float:
    """When in a round the quorum usually has delivered, of facilities that all begin with it; 0 where none was seen."""
    seen = [sorted(one.values()) for one in rounds if one][-WINDOW:]
    return median(seconds[min(quorum, len(seconds)) - 1] for seconds in seen) if seen else 0.0


def closes_after(now: float, opened: float, usual: float, grace: float) -> float:
    """Seconds from `now`, when the quorum has delivered, to the closing of a round that `opened` before.

    A carried update that is handed on at once makes the quorum early; the others are then waited for until the grace
    after the usual quorum, or they would be late, and the next round's quorum early again. With no grace they are not.
    """
    return grace if grace == 0 else max(grace, opened + usual + grace - now)


def useful_rate(
    jobs: Draws,
    quorum: int,
    grace: float,
    *,
    usual: float,
    exponent: float,
    most_late: int,
    carries: bool = True,
) -> float:
    """Useful updates a second over `AHEAD` rounds in which each facility's jobs take these seconds, one by one.

    An update that is n rounds late counts as (1 + n) ** -`exponent` of one. `carries`: late updates count in a later
    round; else they are discarded, as `late: drop` does.
    """
    if not carries:
        return _rate_in_time(jobs, quorum, grace, usual=usual)
    places = {name: iter(seconds) for name, seconds in jobs.items()}
    ends: dict[str, float] = {}
    began: dict[str, int] = {}
    now, useful = 0.0, 0.0
    for number in range(AHEAD):
        for name, seconds in places.items():
            if name not in ends:
                ends[name], began[name] = now + next(seconds), number
        arrivals = sorted(max(end, now) for end in ends.values())
        reached = arrivals[min(quorum, len(arrivals)) - 1]
        closes = min(arrivals[-1], reached + closes_after(reached, now, usual, grace))
        too_late = [end for name, end in ends.items() if number + 1 - began[name] > most_late]
        now = max([closes, *too_late])
        for name in [name for name, end in ends.items() if end <= now]:
            useful += (1 + number - began[name]) ** -exponent
            del ends[name]
    return useful / max(now, 1e-9)


def _rate_in_time(jobs: Draws, quorum: int, grace: float, *, usual: float) -> float:
    """Where what is late is discarded: its facility begins from the newest model once its job has ended."""
    free = dict.fromkeys(jobs, 0.0)
    now, useful = 0.0, 0.0
    for number in range(AHEAD):
        begins = {name: max(now, free[name]) for name in jobs}
        ends = {name: begins[name] + seconds[number] for name, seconds in jobs.items()}
        arrivals = sorted(ends.values())
        reached = arrivals[min(quorum, len(arrivals)) - 1]
        now = min(arrivals[-1], reached + closes_after(reached, now, usual, grace))
        useful += sum(end <= now for end in ends.values())
        free |= {name: end for name, end in ends.items() if begins[name] <= now}
    return useful / max(now, 1e-9)


def draws(rounds: Sequence[Mapping[str, float]]) -> Draws:
    """Jobs to come, each as long as one that its facility had in these rounds."""
    chosen = random.Random(0)
    names = sorted({name for one in rounds for name in one})
    return {name: chosen.choices([one[name] for one in rounds if name in one], k=AHEAD) for name in names}


def candidates(rounds: Sequence[Mapping[str, float]], quorum: int) -> list[float]:
    """No wait at all, and waits after which some facility delivered in some round: at most some of these, evenly."""
    waits = set()
    for seconds in rounds:
        ordered = sorted(seconds.values())
        at = ordered[min(quorum, len(ordered)) - 1]
        waits |= {later - at for later in ordered if later > at}
    found = sorted(waits)
    every = max(1, math.ceil(len(found) / MOST_CANDIDATES))
    return [0.0, *reversed(found[::-1][::every])]


def best_grace(
    rounds: Sequence[Mapping[str, float]],
    quorum: int,
    *,
    exponent: float = 0.5,
    most_late: int = 1,
    carries: bool = True,
) -> float:
    """Seconds to wait after the quorum; `inf`, to wait for all, until `LEARNING_ROUNDS` rounds have been seen.

    Of waits within `MARGIN` of the best the longest is chosen, since an update in time is worth more than the same rate
    of late ones.
    """
    seen = [one for one in rounds if one][-WINDOW:]
    if len(seen) < LEARNING_ROUNDS:
        return math.inf
    jobs, usual = draws(seen), usual_quorum(seen, quorum)
    rates = {
        grace: useful_rate(
            jobs,
            quorum,
            grace,
            usual=usual,
            exponent=exponent,
            most_late=most_late,
            carries=carries,
        )
        for grace in (one if carries else one * (1 + LEEWAY) for one in candidates(seen, quorum))
    }
    most = max(rates.values())
    return max(grace for grace, rate in rates.items() if rate >= most * (1 - MARGIN))
