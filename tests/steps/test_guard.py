"""Laws of the guard: it yields when a round makes the model worse, within its bounds, by the archive alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregation.settings import AggregationSettings
from coordinator.steps.guard import LEAST, guard
from coordinator.steps.schedule import with_rate

LOSSES = st.lists(st.none() | st.floats(0.0, 20.0), max_size=30)


@pytest.mark.parametrize(
    ("losses", "factor", "told"),
    [
        ([], 1.0, False),
        ([5.0, 4.0, 3.0], 1.0, False),
        ([5.0, 4.0, 4.5], 0.5, True),
        ([5.0, 4.0, 4.5, 4.0], 0.5, False),
        ([5.0, 6.0, 7.0, 8.0, 9.0, 10.0], 0.125, True),
        ([5.0, 6.0, 5.0, 4.0, 3.0], 1.0, True),
        ([5.0, 6.0, 5.5, 5.0, 5.2], 0.25, True),
        ([5.0, 6.0, 7.0, 6.0, 5.0, 4.0], 0.5, True),
        ([5.0, 6.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0], 0.5, False),
        ([5.0, 6.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 1.0, True),
        ([5.0, None, 4.0, None, 4.1], 0.5, True),
        ([5.0, 4.0, 4.5, None], 0.5, False),
    ],
)
def test_worked_by_hand(losses, factor, told):
    found = guard(losses)
    assert (found.factor, bool(found.reason)) == (factor, told)


@given(LOSSES)
def test_within_bounds_and_at_its_full_value_while_no_round_is_worse(losses):
    found = guard(losses)
    assert LEAST <= found.factor <= 1
    known = [loss for loss in losses if loss is not None]
    if all(after <= before for before, after in zip(known, known[1:], strict=False)):
        assert found.factor == 1 and not found.reason


def test_two_losses_that_are_told_as_unlike_do_not_look_alike():
    """Of preferences every loss begins at ln 2: `0.6931 after 0.6931` was worse."""
    assert "loss 0.69314 after 0.69312)" in guard([0.69312, 0.69314]).reason
    assert "loss 2.5000 after 2.4000)" in guard([2.4, 2.5]).reason


@pytest.mark.parametrize("rule", ["nesterov", "mean", "fedadam", "median"])
def test_the_factor_is_of_the_rules_own_rate(rule):
    settings = AggregationSettings(rule=rule)
    half = with_rate(settings, guard([1.0, 2.0]).factor)
    assert half.server_learning_rate == settings.server_learning_rate / 2  # type: ignore[attr-defined]
    assert with_rate(settings, guard([2.0, 1.0]).factor) is settings
