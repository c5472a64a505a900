"""The simulator against the trainer's schedule classes on real gloo processes."""

from __future__ import annotations

import pytest

from tests.bench.pipeline_agreement import CASES, SCHEDULES, compare


@pytest.mark.slow  # real processes that sleep for minutes
def test_simulated_seconds_are_within_ten_percent_of_real_ones():
    found = compare(4, 2, CASES, SCHEDULES)
    assert found["largest_error"] < 0.10, found["rows"]
