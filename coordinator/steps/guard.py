"""`aggregation.guard`: lowers the server learning rate while rounds make the global model worse.

A pure function of the archive: the same rounds give the same factor, however often a run was resumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 1 / 8
"""Smallest factor."""
RECOVERY = 3
"""Rounds that improve in a row, after which the factor doubles."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """The guard's factor for one round."""

    factor: float = 1.0
    """Of the server learning rate."""
    reason: str = ""
    """Why the factor is what it is, where it changed in this round; empty: nothing to report."""


def guard(losses: Sequence[float | None]) -> Guard:
    """The factor for round `len(losses) - 1`; `losses[r]`: global validation loss of the model that round r received.

    A rise halves the factor, `RECOVERY` falls in a row double it. Rounds without a report are skipped.
    """
    factor, falls, before = 1.0, 0, None
    found = Guard()
    for number, loss in enumerate(losses):
        found = Guard(factor=factor)
        if loss is None or not math.isfinite(loss):
            continue
        if before is not None and loss > before:
            factor, falls = max(LEAST, factor / 2), 0
            digits = next((n for n in range(4, 17) if f"{loss:.{n}f}" != f"{before:.{n}f}"), 17)
            found = Guard(
                factor=factor,
                reason=f"the model that round {number} received is worse than the one before (mean validation loss "
                f"{loss:.{digits}f} after {before:.{digits}f}): the server learning rate is multiplied by {factor:g}",
            )
        elif before is not None:
            falls += 1
            if falls >= RECOVERY and factor < 1:
                factor, falls = min(1.0, 2 * factor), 0
                found = Guard(
                    factor=factor,
                    reason=f"{RECOVERY} rounds in a row improved: the server learning rate is multiplied by {factor:g}",
                )
        before = loss
    return found
