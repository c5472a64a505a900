"""The coordinator's clock may be set back while a federation runs; its events tell durations all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.archive.journal import Journal
from coordinator.planning.pace import queue_waits
from coordinator.report.timeline import segments, totals


@pytest.mark.parametrize("back", [0.0, 60.0, 250.0, 100_000.0])
def test_a_clock_that_is_set_back_between_rounds_or_within_one_costs_no_time_of_a_job(tmp_path: Path, back: float):
    """Two rounds of two facilities; from the second round on, or from its middle on, the clock is `back` behind."""
    steps = [("queued", "a", 1.0), ("queued", "b", 1.0), ("started", "a", 11.0), ("started", "b", 11.0)]
    steps += [("trained", "a", 111.0), ("trained", "b", 151.0), ("averaging", "", 152.0), ("averaged", "", 160.0)]
    for name, begins in (("between", 0), ("within", 4)):
        journal = Journal(tmp_path / name)
        journal.path.parent.mkdir()
        for number in range(2):
            for place, (kind, who, at) in enumerate(steps):
                behind = back if number and place >= begins else 0.0
                journal.append(kind, time=1e9 + 200 * number + at - behind, facility=who, round=number)
        sums = totals(segments(journal.read(), {}), ["a", "b"])
        assert all(sums[one]["queue"] == 20.0 for one in sums)
        if begins == 0 or not back:
            assert [(sums[one]["train"], sums[one]["wait"]) for one in sums] == [(200.0, 98.0), (280.0, 18.0)]
        else:  # how long the jobs took that ran while it was set is not known
            assert [sums[one]["wait"] for one in sums] == [98.0, 18.0]


@pytest.mark.parametrize("back", [0.5, 5.0, 9.9])
@pytest.mark.parametrize("place", range(1, 5))
def test_a_small_step_of_the_clock_changes_no_order(tmp_path: Path, back: float, place: int):
    """As of a time server: too small to be told from a late line, but a job is in its queue before it begins."""
    journal = Journal(tmp_path)
    kinds = ("queued", "started", "stage", "trained", "verified")
    for number in range(2):
        for at, kind in enumerate(kinds):
            behind = back if (number, at) >= (0, place) else 0.0
            detail = {"stage": "training"} if kind == "stage" else {}
            journal.append(kind, time=1e9 + 20 * number + 4 * at - behind, facility="a", round=number, **detail)
            journal.append("averaging", time=1e9 + 20 * number + 4 * at - behind, round=number)
    own = [one for one in journal.read() if one.facility]
    assert [one.kind for one in own] == [*kinds, *kinds]
    wait = queue_waits(journal.read())["a"]
    assert 0 <= wait <= 4 + 1e-3, "the median of two jobs, of which the clock hides one's at most"
    assert sum(one.seconds for one in segments(own, {}) if one.kind == "queue") <= 8 + 1e-3


def test_a_line_that_is_late_stays_where_its_time_is(tmp_path: Path):
    journal = Journal(tmp_path)
    for kind, time in (("started", 0.0), ("trained", 100.0), ("verified", 50.0), ("averaging", 101.0)):
        journal.append(kind, time=time, facility="a", round=0)
    journal.append("waited", time=20.0, facility="a", round=0, seconds=5.0, nodes=1, handed=True, job="1")
    assert [one.time for one in journal.read()] == [0.0, 20.0, 50.0, 100.0, 101.0]
    with journal.path.open("a") as file:
        file.write('{"unix": NaN, "kind": "started"}\n{"unix": 1e999, "kind": "started"}\n')
    assert len(journal.read()) == 5
