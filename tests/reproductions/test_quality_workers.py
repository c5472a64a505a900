"""Laws of the worker processes of the quality experiment."""

from __future__ import annotations

import time

import pytest

from tests.bench.quality_workers import Clock, spread


def slow(cell: int) -> dict[str, float]:
    time.sleep(0.05 * cell)
    return {"cell": cell, "seconds": 0.05 * cell}


@pytest.mark.slow
def test_every_cell_is_run_once_whatever_the_number_of_workers():
    for jobs in (1, 2):
        rows = list(spread([1, 2, 3], slow, jobs=jobs, minutes=0, kind=lambda _: "", work=float))
        assert sorted((cell, row and row["cell"]) for cell, row in rows) == [(1, 1), (2, 2), (3, 3)]


def test_no_cell_begins_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = Clock(1.0)
    assert clock.allows("a", 100.0)  # nothing is known of it
    clock.took("a", 10.0, 20.0)
    assert clock.allows("a", 26.0) and not clock.allows("a", 27.0) and clock.allows("b", 27.0)
    now = 60.0
    assert not clock.allows("b", 1.0)
