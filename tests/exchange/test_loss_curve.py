"""The training loss over a round: few points, their mean is the steps' mean, and an impossible one is none."""

from __future__ import annotations

import dataclasses
from statistics import fmean
from typing import Any

import pytest

from facility.exchange.messages.loss_curve import KEY, MOST_POINTS, loss_curve, loss_curve_of, mean_of
from facility.exchange.messages.report import Report

FIGURES: dict[str, Any] = dict.fromkeys(
    ("loss_received", "loss_returned", "perplexity_received", "perplexity_returned", "training_loss"), 1.0
)
REPORT = Report(federation="f", facility="a", round=0, samples=1, tokens=1, steps=1, **FIGURES)


@pytest.mark.parametrize("steps", [0, 1, 7, MOST_POINTS, MOST_POINTS + 1, 1000])
def test_a_curve_has_few_points_the_last_of_them_the_last_step_and_every_step_counts_once(steps: int):
    losses = [5.0 - number / 1000 for number in range(steps)]
    curve = loss_curve(losses)
    assert len(curve) == min(steps, MOST_POINTS)
    if steps:
        ends = [end for end, _ in curve]
        spans = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        assert ends[-1] == steps and min(spans) >= 1 and max(spans) - min(spans) <= 1
        total = sum(loss * span for (_, loss), span in zip(curve, spans, strict=True))
        assert total / steps == pytest.approx(fmean(losses), abs=1e-5)


def test_skipped_steps_do_not_count():
    assert loss_curve([2.0, -1.0, 4.0]) == [(1, 2.0), (3, 4.0)]
    assert mean_of([(1, 2.0), (3, 4.0)], 3) == 3.0
    assert mean_of([], 3) is None and mean_of([(5, 2.0)], 0) == 2.0


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([[1, 2.5], [4, 2]], [(1, 2.5), (4, 2.0)]),
        (None, []),
        ("curve", []),
        ([[1, 2.5], [1, 2.0]], []),
        ([[2, 2.5], [1, 2.0]], []),
        ([[0, 2.5]], []),
        ([[True, 2.5]], []),
        ([[1, True]], []),
        ([[1, -1.0]], []),
        ([[1, 1e300]], []),
        ([[1, float("nan")]], []),
        ([[1.0, 2.0]], []),
        ([[10**18, 2.0]], []),
        ([[1, "2"]], []),
        ([[1, 2, 3]], []),
        ([[number, 1.0] for number in range(1, MOST_POINTS + 2)], []),
    ],
)
def test_what_a_facility_tells_is_a_curve_or_nothing(told: Any, expected: list[tuple[int, float]]):
    assert loss_curve_of(dataclasses.replace(REPORT, details={KEY: told})) == expected
