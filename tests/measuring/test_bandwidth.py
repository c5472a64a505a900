"""Whatever times a busy machine gives, a bandwidth is positive, finite and bounded by what messages really got."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from facility.exchange.errors import TransientError
from facility.measuring.bandwidth import SHARE, SharpTimes, Trips, measure_bandwidth

MOST = SharpTimes().most_bytes


def measured(times: list[float], trips: Trips) -> tuple[float, bool, list[tuple[int, float]]]:
    """Bandwidth, whether it stands out, and every message with its seconds; the last time repeats."""
    sent: list[tuple[int, float]] = []

    def flow(size: int) -> float:
        sent.append((size, times[min(len(sent), len(times) - 1)]))
        return sent[-1][1]

    found = measure_bandwidth(flow, lambda value: value, trips, SharpTimes())
    return found.bytes_per_second, found.stands_out, sent


Seconds = st.one_of(
    st.floats(min_value=0, max_value=1e4, allow_subnormal=False), st.sampled_from([0.0, 1e-9, 1e-6, 0.02, 5e-324])
)


@given(times=st.lists(Seconds, min_size=1, max_size=20), median=Seconds, least=Seconds)
def test_whatever_times_come_the_result_is_positive_finite_and_bounded(times, median: float, least: float):
    try:
        rate, stands_out, sent = measured(times, Trips(median=max(median, least), least=min(median, least)))
    except TransientError as error:
        assert "measure again" in str(error)
        return
    got = max(size / seconds for size, seconds in sent if seconds > 0)
    assert 0 < rate < math.inf and rate <= got / SHARE * (1 + 1e-9)
    assert stands_out or rate <= got
    assert all(size <= MOST for size, _ in sent) and len(sent) <= 30


@given(
    rate=st.floats(min_value=1e4, max_value=1e11),
    trip=st.floats(min_value=1e-6, max_value=1.0),
    noise=st.floats(min_value=0, max_value=0.01),
)
def test_a_steady_link_is_found_or_said_to_be_faster(rate: float, trip: float, noise: float):
    def flow(size: int) -> float:
        return trip + size / rate

    trips = Trips(median=trip + noise, least=trip)
    found = measure_bandwidth(flow, lambda value: value, trips, SharpTimes())
    if found.stands_out:
        assert found.bytes_per_second == pytest.approx(rate, rel=1e-3)
    else:
        assert found.bytes_per_second < rate
        assert MOST / rate < max(4 * noise, SHARE * flow(MOST)) * (1 + 1e-6), "the largest message is lost in the noise"


def test_pings_that_a_busy_machine_delayed_give_no_terabytes():
    """As seen: pings of 31 ms under load, then a message of 64 MB in 32 ms; the difference of both gave 65 TB/s."""
    rate, stands_out, _ = measured([0.032], Trips(median=0.031999, least=0.031999))
    assert not stands_out and rate == pytest.approx(MOST / 0.032)
