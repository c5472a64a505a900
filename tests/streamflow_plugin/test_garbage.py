"""Objects that a run keeps are gone through seldom."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.streamflow_plugin.garbage import THRESHOLDS, look_less_often

DEFAULT = (700, 10, 10)


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def passes(kept: int) -> list[int]:
    """How often each generation is gone through while so many objects come to stay."""
    found = [0, 0, 0]

    def note(phase: str, info: dict[str, Any]) -> None:
        found[info["generation"]] += phase == "start"

    gc.collect()
    gc.callbacks.append(note)
    try:
        stay: list[list[int]] = [[] for _ in range(kept)]
    finally:
        gc.callbacks.remove(note)
    del stay
    return found


@pytest.mark.usefixtures("thresholds")
def test_objects_that_stay_are_gone_through_a_fiftieth_as_often():
    gc.set_threshold(*DEFAULT)
    before = passes(200_000)
    look_less_often()
    after = passes(200_000)
    assert sum(before) > 200 and sum(after) <= sum(before) / 50


@pytest.mark.usefixtures("thresholds")
def test_garbage_in_cycles_still_goes():
    gc.set_threshold(*DEFAULT)
    look_less_often()
    for _ in range(4 * THRESHOLDS[0]):
        ring: list[Any] = []
        ring.append(ring)
    assert sum(1 for one in gc.get_objects(generation=0) if isinstance(one, list) and one and one[0] is one) < (
        2 * THRESHOLDS[0]
    )


@pytest.mark.usefixtures("thresholds")
def test_thresholds_that_somebody_has_set_stay():
    gc.set_threshold(1234, 5, 6)
    look_less_often()
    assert gc.get_threshold() == (1234, 5, 6)
