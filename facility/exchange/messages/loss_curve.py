"""The training loss over a round's steps, in a report's `details`: a few means, whatever the number of steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from facility.exchange.messages.plausible import MOST_COUNT, MOST_LOSS
from facility.exchange.messages.report import Report

KEY = "training_losses"
"""In `details`: pairs of a step, counted from 1, and the mean loss of the steps since the pair before."""
MOST_POINTS = 40
"""Most pairs that a round's curve has."""

Curve = list[tuple[int, float]]


def loss_curve(losses: Sequence[float]) -> Curve:
    """Means over spans of equal length but for a step, at most `MOST_POINTS`; a step with a negative loss, which had
    none, does not count."""
    spans = [(end, losses[begin:end]) for begin, end in _spans(len(losses))]
    good = [(end, [loss for loss in span if loss >= 0]) for end, span in spans]
    return [(end, round(math.fsum(span) / len(span), 5)) for end, span in good if span]


def _spans(steps: int) -> list[tuple[int, int]]:
    """Where the spans of this number of steps begin and end."""
    count = min(MOST_POINTS, steps)
    return list(itertools.pairwise([0, *(round(steps * number / count) for number in range(1, count + 1))]))


def mean_of(curve: Curve, steps: int) -> float | None:
    """Mean loss of the steps of a curve over so many, whose spans differ in length by a step; None: it has no point."""
    lengths = {end: end - begin for begin, end in _spans(steps)}
    counts = [lengths.get(end, 1) for end, _ in curve]
    return math.fsum(n * loss for n, (_, loss) in zip(counts, curve, strict=True)) / sum(counts) if curve else None


def loss_curve_of(report: Report) -> Curve:
    """The loss curve in a facility's report; [] if there is none, or an impossible one."""
    pairs = report.details.get(KEY)
    if not isinstance(pairs, list) or len(pairs) > MOST_POINTS:
        return []
    if not all(isinstance(pair, list) and len(pair) == 2 and _possible(*pair) for pair in pairs):
        return []
    steps = [pair[0] for pair in pairs]
    return [(step, float(loss)) for step, loss in pairs] if steps == sorted(set(steps)) else []


def _possible(step: object, loss: object) -> bool:
    if type(step) is not int or type(loss) not in (int, float):
        return False
    return 0 < step <= MOST_COUNT and 0 <= loss <= MOST_LOSS  # type: ignore[operator]
