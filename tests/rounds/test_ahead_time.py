"""Laws of the moment at which a job is submitted ahead of its model."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.ahead_time import WINDOW, Seen, expected, when_to_submit

Seconds = st.floats(0, 1e4, allow_nan=False)
Times = st.lists(Seconds, min_size=1, max_size=WINDOW)


def chosen(waits: list[float], spans: list[float], runs: list[float], wait: float = 300.0, idle: float = 0.05):
    return when_to_submit(Seen(waits=waits, spans=spans, runs=runs), wait=wait, idle=idle)


def test_a_steady_queue_is_hidden_whole_and_no_node_waits():
    found = chosen([300.0] * 3, [1000.0] * 3, [900.0] * 3)
    assert found.after == 700.0
    assert expected(700.0, [300.0], [1000.0], wait=300.0) == (300.0, 0.0)


def test_a_queue_longer_than_a_round_is_asked_as_soon_as_the_job_begins():
    assert chosen([5000.0], [1000.0], [900.0]).after == 0.0


def test_an_empty_queue_hides_nothing():
    found = chosen([1.0, 2.0, 3.0], [3600.0], [3500.0])
    assert found.after is None and "2 s in the queue (median)" in found.reason
    assert chosen([10.0], [1000.0], [900.0]).after is None, "of 1010 s from one training to the next"
    assert chosen([10.2], [1000.0], [900.0]).after == 989.8


def test_until_a_round_was_timed_the_next_job_is_submitted_when_this_one_has_ended():
    assert chosen([], [], []).after == math.inf and chosen([5.0], [], [7.0]).after == math.inf


def test_a_queue_that_varies_is_asked_later_where_less_idling_is_allowed():
    waits, spans, runs = [60.0, 600.0], [1000.0], [900.0]
    careful, bold = chosen(waits, spans, runs, idle=0.01), chosen(waits, spans, runs, wait=1000.0, idle=1.0)
    assert careful.after == 940.0 and bold.after == 400.0


@given(waits=Times, spans=Times, runs=Times, wait=Seconds, idle=st.floats(0.001, 1.0))
def test_no_more_node_hours_are_expected_to_be_lost_than_allowed(waits, spans, runs, wait, idle):
    found = chosen(waits, spans, runs, wait, idle)
    if found.after is None:
        return
    hidden, lost = expected(found.after, waits, spans, wait=wait)
    assert lost <= idle * sum(runs) / len(runs) + 1e-6
    assert 0 <= hidden <= max(waits) + 1e-6


@given(waits=Times, spans=Times, runs=Times, wait=Seconds, less=st.floats(0.001, 1.0), more=st.floats(0.001, 1.0))
def test_whoever_allows_more_idling_hides_no_less(waits, spans, runs, wait, less, more):
    less, more = sorted((less, more))
    hides = []
    for idle in (less, more):
        after = chosen(waits, spans, runs, wait, idle).after
        hides.append(0.0 if after is None else expected(after, waits, spans, wait=wait)[0])
    assert hides[1] >= hides[0] - 1e-6


@given(after=Seconds, waited=Seconds, span=Seconds, wait=Seconds)
def test_a_job_hides_at_most_its_own_wait_and_idles_at_most_as_long_as_it_may(after, waited, span, wait):
    hidden, lost = expected(after, [waited], [span], wait=wait)
    assert 0 <= hidden <= min(waited, max(0.0, span)) + 1e-6 and 0 <= lost <= wait
    assert hidden == pytest.approx(waited) or lost == 0 or lost == wait, "no node waits while the queue is not hidden"


@given(waits=Times, spans=Times, runs=Times, wait=Seconds, worked=st.floats(0, 1e5), lost=st.floats(0, 1e4))
def test_what_jobs_have_waited_counts_against_what_they_may(waits, spans, runs, wait, worked, lost):
    seen, idle = Seen(waits=waits, spans=spans, runs=runs, worked=worked, lost=lost), 0.05
    found = when_to_submit(seen, wait=wait, idle=idle)
    if found.after is not None:
        left = max(0.0, idle * (worked + sum(runs) / len(runs)) - lost)
        assert expected(found.after, waits, spans, wait=wait)[1] <= left + 1e-6
    assert chosen(waits, spans, runs, wait, idle).after == found.after or lost > idle * worked, "as if nothing was lost"


@pytest.mark.parametrize("seed", range(4))
def test_in_queues_and_rounds_that_vary_jobs_wait_as_little_as_was_allowed(seed: int):
    """Log-normal queues (sigma 1) of a median of one training, jobs of half to double the length, 400 rounds."""
    drawn, seen, idle = random.Random(seed), Seen(), 0.05
    for _ in range(400):
        after = when_to_submit(seen, wait=0.5, idle=idle).after
        queued, run = drawn.lognormvariate(0.0, 1.0), drawn.uniform(0.5, 2.0)
        span = run + drawn.lognormvariate(0.0, 1.0)
        if after is not None:
            seen = seen.with_lost(expected(min(after, span), [queued], [span], wait=0.5)[1])
        seen = seen.with_wait(queued).with_span(span).with_run(run)
    assert 0 < seen.lost <= 1.05 * idle * seen.worked


@given(values=st.lists(Seconds, max_size=3 * WINDOW))
def test_what_is_remembered_is_the_latest(values):
    seen = Seen()
    for one in values:
        seen = seen.with_wait(one).with_span(one).with_run(one)
    assert list(seen.waits) == list(seen.spans) == list(seen.runs) == values[-WINDOW:]
