"""Laws of the guard: it yields when a round makes the model worse, within its bounds, by the archive alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregation.settings import AggregationSettings
from coordinator.steps.guard import LEAST, UNCHANGED, guard, noise_of
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
        ([5.0, 6.0, 5.9, 5.8, 5.85, 5.7], 0.25, False),
        ([5.0, 4.0, 4.0003], 1.0, True),
        ([5.0, 4.0, 4.0003, 4.0006], 0.5, True),
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
    assert guard([0.69312, 0.69314]).reason.endswith(f"loss 0.69314 after 0.69312): {UNCHANGED}")
    assert "loss 2.5000 after 2.4000)" in guard([2.4, 2.5]).reason


@given(LOSSES)
def test_every_rise_is_told(losses):
    known = [loss for loss in losses if loss is not None]
    rises = losses[-1:] != [None] and len(known) > 1 and known[-1] > known[-2]
    assert ("is worse than the one before" in guard(losses).reason) == rises


@given(st.lists(st.floats(-0.3, 0.3), min_size=2, max_size=30))
def test_what_the_noise_of_losses_explains_halves_nothing(noise):
    """Differential privacy alone brought the factor to an eighth: half of all rounds rise by the noise."""
    falling = [8.0 - 0.01 * number + one for number, one in enumerate(noise)]
    assert guard(falling, [0.15] * len(falling)).factor == 1
    assert guard([*falling, 9.0], [0.15] * (len(falling) + 1)).factor == 0.5


def test_the_noise_of_the_least_loss_counts_for_as_long_as_it_is_the_least():
    assert guard([5.0, 4.0, 4.5, 4.6], [0.0, 0.3, 0.0, 0.0]).factor == 1
    assert guard([5.0, 4.0, 4.5, 3.9, 4.5], [0.0, 0.3, 0.0, 0.0, 0.0]).factor == 0.5


def test_the_noise_of_a_mean_is_that_of_its_losses_and_none_is_believed_beyond_a_nat():
    told = [{"a": 0.3, "b": 0.4, "away": 1.0}, {"a": 0.5}, {"liar": 1e9}]
    losses = [{"a": 2.0, "b": 3.0}, {"a": 2.0, "without": 3.0}, {"liar": 2.0, "a": 2.0}]
    assert noise_of(losses, told) == pytest.approx([0.25, 0.25, 0.5])
    assert noise_of([{}], [{"a": 1.0}]) == [0.0]


@pytest.mark.parametrize("rule", ["nesterov", "mean", "fedadam", "median"])
def test_the_factor_is_of_the_rules_own_rate(rule):
    settings = AggregationSettings(rule=rule)
    half = with_rate(settings, guard([1.0, 2.0]).factor)
    assert half.server_learning_rate == settings.server_learning_rate / 2  # type: ignore[attr-defined]
    assert with_rate(settings, guard([2.0, 1.0]).factor) is settings
