"""Until when the jobs of the next round train: `rounds: {steps: elastic}`.

Where queues vary, steps that are agreed before the queue leave the nodes of those that began early idle, and everybody
waits for those that began late. So the round's end is agreed instead, and each job takes as many steps as fit until
then, within the stated bounds. The end is the earliest at which as many samples as the settings ask for are expected,
over the waits that each facility's queue was seen to take (`coordinator.rounds.common_end`): the budget of
`coordinator.planning.budget` with the queue as an empirical distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from coordinator.archive.journal import Entry
from coordinator.archive.rounds import RoundFile
from coordinator.config.closing import EvenSettings
from coordinator.planning.budget import FacilityPace
from coordinator.planning.pace import (
    pace_of,
    rounds_beside_training,
    sound_rows,
    times_beside_training,
    times_there_and_back,
)
from coordinator.rounds.common_end import WINDOW, Loads
from facility.exchange.messages.steps import End


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """A facility whose steps follow its queue."""

    pace: FacilityPace
    """With the `fixed_seconds` of both ways."""
    waits: Sequence[float]
    """Seconds of a job beside training, its queue included; one at least, each as likely as the others."""
    least: int
    most: int
    back_seconds: float = 0.0
    """Of the update's way back."""
    own_seconds: float = 0.0
    """Of loading, evaluating and saving: what a job counts that has not measured what comes beside its training."""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """When a round is to end."""

    seconds: float
    """After its model was made."""
    facilities: Mapping[str, Elastic]

    def by_facility(self, now: float) -> dict[str, dict[str, Any]]:
        """By facility, what its job receives, for a model that is made at `now`, seconds since 1970."""
        return {
            name: asdict(
                End(
                    time=round(now + self.seconds - one.back_seconds, 3),
                    seconds_per_step=one.pace.seconds_per_step,
                    beside=round(one.own_seconds, 3),
                    least=one.least,
                    most=one.most,
                )
            )
            for name, one in self.facilities.items()
        }


def loads_of(facilities: Sequence[Elastic]) -> Loads:
    """The facilities as arrays, a row each."""
    waits = np.full((len(facilities), max(len(one.waits) for one in facilities)), np.nan)
    for row, one in zip(waits, facilities, strict=True):
        row[: len(one.waits)] = np.asarray(one.waits) + one.pace.fixed_seconds
    return Loads(
        waits=waits,
        seconds_per_step=np.array([one.pace.seconds_per_step for one in facilities]),
        samples_per_step=np.array([one.pace.samples_per_step for one in facilities]),
        least=np.array([float(one.least) for one in facilities]),
        most=np.array([float(one.most) for one in facilities]),
    )


def common_end(facilities: Sequence[Elastic], samples: float) -> float:
    """The earliest end, in seconds after the model, at which so many samples are expected of all together."""
    return loads_of(facilities).end(samples)


def ends_ahead(
    even: EvenSettings, nominal: Mapping[str, int], history: Sequence[RoundFile], entries: Sequence[Entry]
) -> Ends | None:
    """When the next round is to end; None where it is not asked for, or no two facilities were timed.

    A facility of which no sound round is known takes the steps of its settings.
    """
    rows = [row for entry in history for row in entry.facilities]
    known = {name: found for name in nominal if (found := sound_rows(rows, name))}
    if even.steps != "elastic" or len(known) < 2:
        return None
    waits, (there, back) = times_beside_training(entries, rows), times_there_and_back(entries)
    facilities = {}
    for name, found in known.items():
        moving = there.get(name, 0.0) + back.get(name, 0.0)
        least, most = even.bounds(nominal[name])
        pace = pace_of(name, found)
        facilities[name] = Elastic(
            pace=replace(pace, fixed_seconds=moving),
            waits=(waits.get(name) or _waits_of_rounds(history, name, moving) or [pace.fixed_seconds])[-WINDOW:],
            least=least,
            most=most,
            back_seconds=back.get(name, 0.0),
            own_seconds=pace.fixed_seconds,
        )
    wanted = sum(nominal[name] * one.pace.samples_per_step for name, one in facilities.items())
    return Ends(seconds=common_end(list(facilities.values()), wanted), facilities=facilities)


def _waits_of_rounds(history: Sequence[RoundFile], name: str, moving: float) -> list[float]:
    return [max(0.0, seconds - moving) for seconds in rounds_beside_training(history, name)]
