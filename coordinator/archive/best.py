"""The best of a federation's models, by its global validation loss."""

from __future__ import annotations

import math
from collections.abc import Sequence


def best_round(losses: Sequence[float | None]) -> int | None:
    """The round that received the best model, the latest of equal ones; None where no loss is known."""
    known = [(loss, -number) for number, loss in enumerate(losses) if loss is not None and math.isfinite(loss)]
    return -min(known)[1] if known else None
