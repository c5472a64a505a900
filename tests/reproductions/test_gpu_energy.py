"""The integral of power that energy counters are compared with."""

from __future__ import annotations

import pytest

from coordinator.archive.journal import Entry
from tests.bench.gpu_energy import energies, joules


def test_a_ramp_has_the_area_of_its_triangle():
    ramp = [(100 + 0.25 * i, 10 * 0.25 * i) for i in range(41)]  # 0 to 100 W in 10 s
    assert joules(ramp, 100, 110) == pytest.approx(500)
    assert joules(ramp, 102.1, 106.3) == pytest.approx((21 + 63) / 2 * 4.2)


def test_no_figure_for_a_time_that_was_not_seen():
    seen = [(100.0, 50.0), (101.0, 50.0)]
    assert joules(seen, 99.9, 100.5) is None and joules(seen, 100.5, 101.1) is None and joules([], 0, 1) is None


def test_a_job_is_compared_over_its_own_seconds():
    samples = [(0.0, 100.0), (10.0, 100.0), (10.001, 300.0), (20.0, 300.0)]
    events = [Entry(time=18.0, kind="trained", facility="a", round=0)]
    used = {"node_seconds": 5.0, "energy_joules": 1490.0, "energy_source": "nvml"}
    rows = [{"round": 0, "facilities": [{"facility": "a", "usage": used}, {"facility": "b", "usage": None}]}]
    first, second = energies(rows, events, samples)
    assert first["power_integral_joules"] == pytest.approx(1500) and first["source"] == "nvml"
    assert second["joules"] is None and "power_integral_joules" not in second
