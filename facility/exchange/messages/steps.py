"""Optimizer steps that the coordinator asks of each facility in one round, in the manifest of the round's model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeGuard

from facility.exchange.messages.manifest import Manifest

KEY = "steps"
"""In a manifest's `extra`: steps by facility. Absent: what the facility's settings say."""
ENDS = "ends"
"""In a manifest's `extra`: by facility, when its training is to end (`End`). Absent: after its steps."""
MOST = 10**9


@dataclass(frozen=True, kw_only=True)
class End:
    """When the job of one facility in one round is to end, so that all facilities' do."""

    time: float
    """Seconds since 1970."""
    seconds_per_step: float
    beside: float
    """Seconds that loading, evaluating and saving are expected to take."""
    least: int
    """Steps of a job that begins too late."""
    most: int
    """Steps of one that begins early."""

    def steps_from(self, now: float, beside: float | None = None) -> int:
        """Steps of a job that decides at `now`, seconds since 1970. `beside`: seconds, where the job knows better."""
        left = self.time - now - (self.beside if beside is None else beside)
        room = math.floor(min(max(left / self.seconds_per_step, 0.0), float(MOST)))
        return min(max(room, self.least), self.most)


def steps_asked(manifest: Manifest, facility: str, *, most: int = MOST) -> int | None:
    """What this facility is asked for; None where nothing is, or nothing that it agreed to: `most`, by its settings."""
    asked = manifest.extra.get(KEY)
    steps = asked.get(facility) if isinstance(asked, dict) else None
    return steps if are_possible(steps, most) else None


def end_asked(manifest: Manifest, facility: str, *, most: int = MOST) -> End | None:
    """When this facility's training is to end; None where nothing, or nothing sensible or agreed to, is said of it."""
    asked = manifest.extra.get(ENDS)
    fields = asked.get(facility) if isinstance(asked, dict) else None
    if not isinstance(fields, dict) or set(fields) != {"time", "seconds_per_step", "beside", "least", "most"}:
        return None
    numbers = [fields["time"], fields["seconds_per_step"], fields["beside"]]
    if not all(isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < 1e12 for n in numbers):
        return None
    if fields["seconds_per_step"] <= 0:
        return None
    if (
        not are_possible(fields["least"], most)
        or not are_possible(fields["most"], most)
        or fields["least"] > fields["most"]
    ):
        return None
    return End(
        time=float(fields["time"]),
        seconds_per_step=float(fields["seconds_per_step"]),
        beside=float(fields["beside"]),
        least=fields["least"],
        most=fields["most"],
    )


def are_possible(steps: object, most: int) -> TypeGuard[int]:
    """Whether `steps` is a number of steps, of at most `most`."""
    return isinstance(steps, int) and not isinstance(steps, bool) and 1 <= steps <= min(most, MOST)
