"""What rounds that close early gain, by the coordinator's own closing on a clock that jumps."""

from __future__ import annotations

import itertools

import numpy
import pytest

from coordinator.config.closing import ClosingSettings
from tests.streamflow_plugin.course import Seconds, course_of

NAMES = ["a", "b", "c", "d"]


def drawn(seed: int, sigma: float, rounds: int) -> Seconds:
    """A round's training of one unit after a log-normal wait of a median of one."""
    waits = numpy.random.default_rng(seed).lognormal(0.0, sigma, (len(NAMES), 4 * rounds))
    made = {name: itertools.count() for name in NAMES}
    return lambda name, _: 1.0 + float(waits[NAMES.index(name), next(made[name]) % waits.shape[1]])


def test_one_that_is_four_times_slower_costs_the_others_no_time():
    slow: Seconds = lambda name, _: 4.0 if name == "d" else 1.0  # noqa: E731
    whole = course_of(None, NAMES, slow, 20)
    found = course_of(ClosingSettings(quorum=3, grace=0.0), NAMES, slow, 20)
    assert (whole.closed[-1], whole.updates) == (80, 80)
    assert found.closed[-1] == 20 and found.updates == 3 * 20 + 5


def test_facilities_that_differ_by_a_tenth_are_waited_for():
    """`grace: auto`: an update that is carried makes the next quorum early, which must not make others late in turn."""
    spread = numpy.random.default_rng(0).uniform(1.0, 1.1, (len(NAMES), 40))
    seconds: Seconds = lambda name, number: float(spread[NAMES.index(name), number])  # noqa: E731
    whole, found = (course_of(one, NAMES, seconds, 40) for one in (None, ClosingSettings(quorum=0.75)))
    assert 0.99 <= found.closed[-1] / whole.closed[-1] <= 1.01
    assert found.updates >= 0.95 * whole.updates


def test_where_late_updates_are_dropped_they_are_worth_nothing_to_the_wait():
    """One of two takes 1.9 times as long: both in 1.9 are more than one in 1, and carried it would be 1.35 in 1."""
    slow: Seconds = lambda name, _: 1.9 if name == "b" else 1.0  # noqa: E731
    found = course_of(ClosingSettings(quorum=1, late="drop"), NAMES[:2], slow, 20)
    assert found.updates == 2 * 20
    assert course_of(ClosingSettings(quorum=1), NAMES[:2], slow, 20).closed[-1] < 25


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_with_random_queues_more_useful_updates_are_averaged_in_the_same_time(seed: int):
    whole = course_of(None, NAMES, drawn(seed, 1.0, 60), 60)
    found = course_of(ClosingSettings(quorum=1, grace=0.0), NAMES, drawn(seed, 1.0, 60), 240)
    assert found.updates / found.closed[-1] > 1.4 * whole.updates / whole.closed[-1]


def test_every_job_is_handed_on_once_whatever_the_waits():
    for seed in range(5):
        course = course_of(ClosingSettings(quorum=2, grace=0.5), NAMES, drawn(seed, 1.5, 30), 30)
        for name in NAMES:
            used = [by[name] for by in course.delivered if name in by]
            assert used == sorted(set(used))
        assert set(course.delivered[-1]) == set(NAMES), "the last round waits for all"
