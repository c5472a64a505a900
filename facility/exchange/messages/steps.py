"""Optimizer steps that the coordinator asks of each facility in one round, in the manifest of the round's model."""

from __future__ import annotations

from facility.exchange.messages.manifest import Manifest

KEY = "steps"
"""In a manifest's `extra`: steps by facility. Absent: what the facility's settings say."""
MOST = 10**9


def steps_asked(manifest: Manifest, facility: str, *, most: int = MOST) -> int | None:
    """What this facility is asked for; None where nothing is, or nothing that it agreed to: `most`, by its settings."""
    asked = manifest.extra.get(KEY)
    steps = asked.get(facility) if isinstance(asked, dict) else None
    possible = isinstance(steps, int) and not isinstance(steps, bool) and 1 <= steps <= min(most, MOST)
    return steps if possible else None
