"""The wait after the quorum: laws over random speeds, and a plain search over every wait that was seen."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.streamflow_plugin.grace import LEARNING_ROUNDS, best_grace, seconds_of_round, useful_rate

NAMES = "abcde"
SPEEDS = st.lists(
    st.fixed_dictionaries({name: st.floats(0.5, 500) for name in NAMES[:4]}), min_size=LEARNING_ROUNDS, max_size=5
)


@given(rounds=SPEEDS, quorum=st.integers(1, 4))
def test_no_other_wait_that_was_seen_is_better(rounds: list[dict[str, float]], quorum: int):
    chosen = best_grace(rounds, quorum)
    assert chosen >= 0
    rate = useful_rate(rounds, quorum, chosen, exponent=0.5, weights={})
    after = [later - sorted(one.values())[quorum - 1] for one in rounds for later in one.values()]
    for other in [0.0, *(wait for wait in after if wait > 0)]:
        assert useful_rate(rounds, quorum, other, exponent=0.5, weights={}) <= rate * (1 + 1e-6)


@given(seconds=st.lists(st.floats(0.1, 100), min_size=1, max_size=6), grace=st.floats(0, 100), more=st.floats(0, 100))
def test_a_round_never_closes_before_its_quorum_nor_after_its_last(seconds: list[float], grace: float, more: float):
    for quorum in range(1, len(seconds) + 1):
        closes = seconds_of_round(seconds, quorum, grace)
        assert sorted(seconds)[quorum - 1] <= closes <= max(seconds)
        assert closes <= seconds_of_round(seconds, quorum, grace + more)


def test_the_first_rounds_wait_for_all():
    assert best_grace([], 1) == best_grace([{"a": 1.0}], 1) == math.inf


def test_even_facilities_are_all_waited_for():
    assert best_grace([{"a": 10.0, "b": 10.5, "c": 11.0}] * 3, 2) >= 0.5


@pytest.mark.parametrize("slow", [4.0, 40.0])
def test_one_that_is_much_slower_is_not_waited_for(slow: float):
    assert best_grace([{"a": 10.0, "b": 10.0, "c": 10.0, "d": 10.0 * slow}] * 3, 3) == 0.0


def test_the_rate_by_hand():
    """d delivers every fourth round at half its weight: 3 + 1/4 x 1/2 in 10 seconds; waiting: 4 in 40."""
    rounds = [{"a": 10.0, "b": 10.0, "c": 10.0, "d": 40.0}]
    assert useful_rate(rounds, 3, 0.0, exponent=0.5, weights={}) == pytest.approx((3 + 0.125) / 10)
    assert useful_rate(rounds, 3, 30.0, exponent=0.5, weights={}) == pytest.approx(4 / 40)
