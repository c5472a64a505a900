"""Rows of a pass in which every record has a gradient of its own, as differential privacy needs, and their memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from facility.exchange.memory.units import UnitMemory

GRADIENT_BYTES = 256 << 20
"""Gradients of one micro-batch's rows, where `training.micro_batch_sequences` does not say how many rows it has."""
MOST_ROWS = 32
"""Most rows of a micro-batch of a size that is not given."""
DEVIATIONS = 4
"""By so many standard deviations more records than expected a pass has room for."""


def rows_of(asked: int, trained: int, expected: float) -> int:
    """Rows of a micro-batch: each has a gradient of every trained parameter in float32.

    `expected`: records that this rank draws for a step, on average. Hardly ever it draws more than four deviations
    more (of a Poisson sample, the root of the mean): room for others would stay empty.
    """
    drawn = math.ceil(expected + DEVIATIONS * math.sqrt(expected))
    return max(1, min(asked or min(MOST_ROWS, GRADIENT_BYTES // (4 * max(1, trained))), drawn))


def record_bytes(units: Sequence[UnitMemory], rows: int, kept: Sequence[float], *, logits: float, last: float) -> int:
    """What the rows' gradients need beyond all activations and logits, when most is there, in the backward pass.

    A unit's gradients come while its activations go, from the head to the embedding; `kept`: bytes of activations, by
    unit; `logits`: of logits and what their gradient is worked out from; `last`: of that gradient alone, which the
    head's begins with. An embedding that is the output layer, too, has a gradient as each, and their sum. Afterwards
    the rows are summed, with room for one tensor's sum.
    """
    first, head = units[0], units[-1]
    tied = 0 if head.projects else first.largest_trained
    values, waiting = head.trained + tied, float(sum(kept))
    most = max(waiting + logits, waiting + last + 4 * rows * values)
    for unit, own in zip(reversed(units[1:-1]), reversed(kept[1:-1]), strict=True):
        values += unit.trained
        most = max(most, waiting + 4 * rows * values)
        waiting -= own
    values += first.trained
    summed = rows * sum(unit.trained for unit in units) + max(unit.largest_trained for unit in units)
    most = max(most, 4 * rows * (values + tied), 4 * summed)
    return round(most - sum(kept) - logits)
