"""The wait after the quorum: laws over random speeds, rates worked by hand, and what it gains under random queues."""

from __future__ import annotations

import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.config.closing import ClosingSettings
from coordinator.streamflow_plugin.grace import (
    AHEAD,
    LEARNING_ROUNDS,
    MARGIN,
    best_grace,
    candidates,
    closes_after,
    draws,
    useful_rate,
    usual_quorum,
)
from tests.streamflow_plugin.course import course_of

NAMES = "abcde"
SPEEDS = st.lists(
    st.fixed_dictionaries({name: st.floats(0.5, 500) for name in NAMES[:4]}), min_size=LEARNING_ROUNDS, max_size=5
)


def rate(jobs: dict[str, list[float]], quorum: int, grace: float, *, usual: float = 0.0, most_late: int = 8) -> float:
    return useful_rate(jobs, quorum, grace, usual=usual, exponent=0.5, most_late=most_late)


@pytest.mark.slow
@given(rounds=SPEEDS, quorum=st.integers(1, 4))
def test_no_other_candidate_is_clearly_better_and_no_longer_one_as_good(rounds: list[dict[str, float]], quorum: int):
    chosen, usual, jobs = best_grace(rounds, quorum, most_late=8), usual_quorum(rounds, quorum), draws(rounds)
    rates = {
        one: useful_rate(jobs, quorum, one, usual=usual, exponent=0.5, most_late=8)
        for one in candidates(rounds, quorum)
    }
    assert rates[chosen] >= max(rates.values()) * (1 - MARGIN)
    assert all(one <= chosen for one, value in rates.items() if value >= max(rates.values()) * (1 - MARGIN))


@given(rounds=SPEEDS, quorum=st.integers(1, 4))
def test_waiting_for_the_longest_is_waiting_for_all(rounds: list[dict[str, float]], quorum: int):
    jobs = draws(rounds)
    seconds = sum(max(own[number] for own in jobs.values()) for number in range(AHEAD))
    assert rate({**jobs}, quorum, 1000.0) == pytest.approx(AHEAD * len(jobs) / seconds)  # type: ignore[arg-type]


@given(now=st.floats(0, 100), opened=st.floats(0, 100), usual=st.floats(0, 100), grace=st.floats(0, 100))
def test_a_round_stays_open_for_its_grace_at_least(now: float, opened: float, usual: float, grace: float):
    assert closes_after(now, opened, usual, grace) >= grace
    assert closes_after(now, opened, usual, 0.0) == 0.0


def test_the_first_rounds_wait_for_all():
    assert best_grace([], 1) == best_grace([{"a": 1.0}], 1) == math.inf


def test_even_facilities_are_all_waited_for():
    assert best_grace([{"a": 10.0, "b": 10.5, "c": 11.0}] * 3, 2, most_late=8) >= 0.5


@pytest.mark.parametrize("slow", [4.0, 40.0])
def test_one_that_is_much_slower_is_not_waited_for(slow: float):
    assert best_grace([{"a": 10.0, "b": 10.0, "c": 10.0, "d": 10.0 * slow}] * 3, 3, most_late=8) == 0.0


def test_the_rate_by_hand():
    """d delivers every fourth round, three rounds late: 3 + 1/4 x 1/2 in 10 seconds; waiting: 4 in 40."""
    jobs = {name: [10.0] * AHEAD for name in "abc"} | {"d": [40.0] * AHEAD}
    assert rate(jobs, 3, 0.0) == pytest.approx((3 + 0.125) / 10)
    assert rate(jobs, 3, 30.0) == pytest.approx(4 / 40)


def test_what_would_be_too_late_is_waited_for_by_hand():
    """One round late at most: two rounds take 40 seconds, with 3 + 3 updates in time and one at 2 ** -1/2."""
    jobs = {name: [10.0] * AHEAD for name in "abc"} | {"d": [40.0] * AHEAD}
    assert rate(jobs, 3, 0.0, most_late=1) == pytest.approx((6 + 2**-0.5) / 40)


@pytest.mark.slow
@pytest.mark.parametrize(("facilities", "least"), [(4, 1.1), (8, 1.35)])
def test_under_random_queues_it_gains_as_much_as_the_best_fixed_wait(facilities: int, least: float):
    """Log-normal queues as long as the training: discounted updates a second over waiting for all, three seeds."""
    names = [f"f{number}" for number in range(facilities)]
    gains: list[float] = []
    for seed in range(3):
        waits = numpy.random.default_rng(seed).lognormal(0.0, 1.0, (facilities, 400))

        def of(settings: ClosingSettings | None, rounds: int, waits: numpy.ndarray = waits) -> float:
            left = {name: iter(row) for name, row in zip(names, waits, strict=True)}
            course = course_of(settings, names, lambda name, _: 1.0 + float(next(left[name])), rounds)
            return course.useful() / course.closed[-1]

        gains.append(of(ClosingSettings(quorum=0.75), 40) / of(None, 40))
    assert numpy.mean(gains) > least
