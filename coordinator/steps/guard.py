"""`aggregation.guard`: lowers the server learning rate while rounds make the global model worse.

A pure function of the archive: the same rounds give the same factor, however often a run was resumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.steps.global_loss import Told

LEAST = 1 / 8
"""Smallest factor."""
RECOVERY = 3
"""Rounds that improve in a row, after which the factor doubles."""
TOLERATED = 1e-4
"""Share of the least loss so far by which a loss may be above it and halve nothing: as much as half precision, or
another number of ranks, moves it. Where the server learning rate is too large, 3e-3 let half of the gain go."""
DEVIATIONS = 3.0
"""Standard deviations of a difference that its noise explains (differential privacy)."""
MOST_DEVIATION = 1.0
"""Nats of noise in its loss that a facility is believed: by more it would switch the guard off for all."""
UNCHANGED = "too little, or too uncertain, to lower the server learning rate"
"""What follows from a rise that halves nothing."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """The guard's factor for one round."""

    factor: float = 1.0
    """Of the server learning rate."""
    reason: str = ""
    """What happened in this round: a rise, or why the factor is what it is where it changed; empty: neither."""


def guard(losses: Sequence[float | None], noise: Sequence[float] = ()) -> Guard:
    """The factor for round `len(losses) - 1`; `losses[r]`: global validation loss of the model that round r received.

    A rise is reported. It halves the factor where the loss is above the least one so far by more than `TOLERATED`, and
    than their noise explains: `noise[r]` is its standard deviation in `losses[r]`, in nats, 0 where there is none.
    `RECOVERY` falls in a row double the factor. Rounds without a report are skipped.
    """
    factor, falls = 1.0, 0
    before, least, of_least = math.inf, math.inf, 0.0
    found = Guard()
    for number, loss in enumerate(losses):
        found = Guard(factor=factor)
        if loss is None or not math.isfinite(loss):
            continue
        own = noise[number] if number < len(noise) else 0.0
        if loss > before:
            falls = 0
            limit = least + TOLERATED * abs(least) + DEVIATIONS * math.hypot(own, of_least)
            factor = max(LEAST, factor / 2) if loss > limit else factor
            found = Guard(factor=factor, reason=_worse(number, loss, before, factor, halved=loss > limit))
        elif before < math.inf:
            falls += 1
            if falls >= RECOVERY and factor < 1:
                factor, falls = min(1.0, 2 * factor), 0
                found = Guard(
                    factor=factor,
                    reason=f"{RECOVERY} rounds in a row improved: the server learning rate is multiplied by {factor:g}",
                )
        before = loss
        least, of_least = min((least, of_least), (loss, own))
    return found


def _worse(number: int, loss: float, before: float, factor: float, *, halved: bool) -> str:
    digits = next((n for n in range(4, 17) if f"{loss:.{n}f}" != f"{before:.{n}f}"), 17)
    return (
        f"the model that round {number} received is worse than the one before (mean validation loss "
        f"{loss:.{digits}f} after {before:.{digits}f}): "
        + (f"the server learning rate is multiplied by {factor:g}" if halved else UNCHANGED)
    )


def noise_of(reported: Sequence[Told], deviations: Sequence[Told]) -> list[float]:
    """Standard deviation of the noise in the mean of each round's `reported` losses, in nats. `deviations`: what each
    facility says of its own, by round; none is believed beyond `MOST_DEVIATION`."""
    return [
        math.hypot(*(min(noise.get(name, 0.0), MOST_DEVIATION) for name in losses)) / max(1, len(losses))
        for losses, noise in zip(reported, deviations, strict=True)
    ]
