"""Emulated heterogeneity is a pure function with the frequencies it promises."""

from __future__ import annotations

import json

import pytest

from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.emulation import Emulation, read_trace


def test_stalls_come_with_their_probability_and_do_not_depend_on_who_asks_first():
    emulation = Emulation(probability=0.1, seconds=0.2, seed=3)
    drawn = [emulation.stall(worker, draw) for worker in range(8) for draw in range(1000)]
    assert set(drawn) == {0.0, 0.2}
    assert sum(drawn) / 0.2 / 8000 == pytest.approx(0.1, abs=0.01)
    backwards = [emulation.stall(worker, draw) for worker in reversed(range(8)) for draw in reversed(range(1000))]
    assert backwards[::-1] == drawn
    assert [emulation.stall(0, d, stage=1) for d in range(1000)] != drawn[:1000]
    assert [Emulation(probability=0.1, seconds=0.2, seed=4).stall(0, d) for d in range(1000)] != drawn[:1000]


def test_factors_and_traces_multiply():
    emulation = Emulation(factors=(1.0, 5.0), trace={1: ((0.0, 1.0), (10.0, 2.0))})
    assert emulation.duration(0, 0.1, 0) == 0.1
    assert emulation.duration(1, 0.1, 0, at_seconds=9.9) == pytest.approx(0.5)
    assert emulation.duration(1, 0.1, 0, at_seconds=10.0) == pytest.approx(1.0)
    assert emulation.duration(7, 0.1, 0) == 0.1
    assert emulation.active and not Emulation().active


@pytest.mark.parametrize(
    ("given", "active"),
    [
        ({"factors": (3.0, 2.0)}, True),
        ({"factors": (1.0, 1.0)}, False),
        ({"probability": 0.1, "seconds": 0.2}, True),
        ({"probability": 0.1}, False),
        ({"seconds": 0.2}, False),
        ({"trace": {0: ((0.0, 2.0),)}}, True),
    ],
)
def test_each_kind_alone_slows_a_rank_down(given, active):
    assert Emulation(**given).active == active


def test_a_trace_file_is_read_and_checked(tmp_path):
    path = tmp_path / "speeds.json"
    path.write_text(json.dumps({"format": 1, "workers": {"2": [[0, 1], [3.5, 4]]}}))
    assert read_trace(path) == {2: ((0.0, 1.0), (3.5, 4.0))}
    for wrong in (
        '{"format": 1}',
        "no json",
        '{"format": 1, "workers": {"0": [[5, 1], [1, 1]]}}',
        '{"format": 1, "workers": {"0": [[0, 0]]}}',
    ):
        path.write_text(wrong)
        with pytest.raises(ConfigurationError, match="speeds.json"):
            read_trace(path)


@pytest.mark.parametrize("wrong", [{"probability": 1.5}, {"seconds": -1}, {"factors": (0.0,)}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Emulation(**wrong)
