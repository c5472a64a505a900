"""Durations and sizes are read back from their words to the digits shown, whatever they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.durations import format_duration
from facility.exchange.sizes import format_bytes

SECONDS = {"s": 1, "min": 60, "h": 3600}
BYTES = {unit: 1000.0**power for power, unit in enumerate(("B", "kB", "MB", "GB", "TB", "PB", "EB"))}


@given(st.floats(0, 1e7))
def test_a_span_is_within_its_last_digit(seconds: float):
    text, unit = format_duration(seconds).split()
    whole, _, rest = text.replace(",", "").partition(":")
    read = float(whole) * SECONDS[unit] + (int(rest) * SECONDS[unit] / 60 if rest else 0)
    step = SECONDS[unit] / 60 if rest else 1.0 if seconds >= 1 else 0.1
    assert abs(read - seconds) <= step, (seconds, format_duration(seconds))
    assert not rest or (len(rest) == 2 and int(rest) < 60)


@given(st.floats(-9e20, 9e20))
def test_a_size_has_three_digits_and_is_within_half_of_the_last(count: float):
    text, unit = format_bytes(count).split()
    assert "e" not in text or abs(count) < 0.001, format_bytes(count)
    assert float(text) * BYTES[unit] == pytest.approx(count, rel=5.1e-3, abs=1e-9)
    assert abs(float(text)) < 1000


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-3, "0 s"), (0.44, "0.4 s"), (42.4, "42 s"), (187, "3:07 min"), (600, "10 min"), (9000, "2:30 h"), (7200, "2 h")],
)
def test_spans_in_words(seconds: float, words: str):
    assert format_duration(seconds) == words
