"""Steps of the next round by facility, so that all end together: `rounds: {steps: auto}`.

The budget of `coordinator.planning.budget` (divisible loads), from the paces of the latest rounds, queue and transfers
included: as many samples as the settings ask for in all, at the earliest common end, within the stated bounds. Steps in
use stay unless others shorten the round by `GAIN` (hysteresis), so that noise in the times moves nothing, or the
settings ask for more than they do, as where `training.steps` was raised or a facility has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.archive.journal import Entry
from coordinator.archive.rounds import RoundFile
from coordinator.config.closing import EvenSettings
from coordinator.planning.budget import hold, plan_within
from coordinator.planning.pace import moving_times, pace_of, queue_waits, sound_rows

GAIN = 0.05
"""Share by which other steps must shorten a round."""


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """What the next round asks for."""

    steps: dict[str, int]
    reason: str


def steps_ahead(
    even: EvenSettings, nominal: dict[str, int], history: Sequence[RoundFile], entries: Sequence[Entry]
) -> Ahead:
    """`nominal`: what the settings ask of each facility. One that no sound round is known of does just that."""
    rows = [row for entry in history for row in entry.facilities]
    known = {name: found for name in nominal if (found := sound_rows(rows, name))}
    earlier = next((entry.next_steps for entry in reversed(history) if entry.next_steps), {})
    before = {name: earlier.get(name, steps) for name, steps in nominal.items()}
    if len(known) < 2:
        return Ahead(steps=dict(nominal), reason="")
    waits, moving = queue_waits(entries), moving_times(entries)
    bounds = {name: even.bounds(nominal[name]) for name in known}
    paces = [
        pace_of(name, found, queue_seconds=waits.get(name, 0.0), moving_seconds=moving.get(name, 0.0))
        for name, found in known.items()
    ]
    wanted = sum(nominal[pace.name] * pace.samples_per_step for pace in paces)
    fresh = plan_within(paces, bounds, wanted)
    used = {name: min(max(before[name], bounds[name][0]), bounds[name][1]) for name in known}
    chosen = hold(fresh, paces, used, GAIN, wanted)
    return Ahead(steps=nominal | chosen.steps, reason=chosen.reasons[0])
