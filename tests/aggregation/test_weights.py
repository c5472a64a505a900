"""What an update counts: given weights, reports, discounts, and what is none of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coordinator.aggregation.settings import AggregationSettings
from facility.exchange.errors import ConfigurationError, UpdateRefused
from tests.aggregation import make
from tests.aggregation.make import aggregate

SHAPES = {"a.weight": (30, 20), "b.bias": (7,)}


@pytest.fixture
def round0(tmp_path: Path) -> tuple[Path, list[Path]]:
    start = make.random_tensors(0, SHAPES, torch.bfloat16)
    base = make.model(tmp_path / "base", start)
    return base, [make.update(tmp_path / f, make.moved(start, i), base=base, facility=f) for i, f in enumerate("xyz")]


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), True, "2", 1e308, 5e-324])
def test_given_weights_that_are_no_weights(weight):
    with pytest.raises(ConfigurationError, match="weights.x is .*expected .*1e-18.*1e.?18"):
        AggregationSettings(rule="mean", weights={"x": weight})


@pytest.mark.parametrize("wide", [1e18, 1e-18])
def test_the_widest_weights_and_discounts_make_a_mean(tmp_path: Path, wide: float):
    """Sums of larger ones overflowed, shares of smaller ones were 0, as were all late ones under a steep discount."""
    base = make.model(tmp_path / "base", {"w": torch.zeros(4)}, round=1000)
    paths = [make.update(tmp_path / n, {"w": torch.ones(4)}, base=base, facility=n, round=0) for n in "xyz"]
    settings = AggregationSettings(
        rule="mean", weights={"x": wide, "y": 1.0, "z": 1 / wide}, maximum_staleness=1000, staleness_exponent=64
    )
    record = aggregate(base=base, updates=paths, out=tmp_path / "out", settings=settings)
    assert all(one.weight > 0 for one in record.participants)
    torch.testing.assert_close(make.read_all(tmp_path / "out")["w"], torch.ones(4))


def test_a_facility_without_a_given_weight(round0, tmp_path: Path):
    with pytest.raises(ConfigurationError, match="'z'"):
        aggregate(
            base=round0[0],
            updates=round0[1],
            out=tmp_path / "out",
            settings=AggregationSettings(rule="mean", weights={"x": 1, "y": 1}),
        )


def test_an_update_of_no_tokens(round0, tmp_path: Path):
    base, updates = round0
    tensors = make.read_all(updates[0])
    none = make.update(tmp_path / "none", tensors, base=base, facility="none", tokens=0)
    with pytest.raises(UpdateRefused, match="'none'.*weight is 0"):
        aggregate(base=base, updates=[*updates, none], out=tmp_path / "out")
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob(".*"))
