"""A federation under StreamFlow whose rounds do not wait for the slowest facility."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from coordinator.engine.render import write
from tests.engine.engines import streamflow
from tests.federations import write_federation

SLOW = 12.0
"""Seconds of the slow facility; the others take some two seconds, engine included."""


@pytest.mark.timeout(400)
def test_rounds_close_without_the_slow_one_whose_updates_count_later(tmp_path: Path):
    path = write_federation(
        tmp_path, ["a", "b", "slow"], rounds={"count": 5, "quorum": 2, "grace": 0, "late": "carry"}, keep_rounds=4
    )
    (tmp_path / "sites" / "slow" / "dataset" / "seconds").write_text(str(SLOW))
    write(read_federation(path))
    tool = tmp_path / "cwl" / "tools" / "train.cwl"
    tool.write_text(tool.read_text().replace("update]", "update, --module, tests.stand_in_trainer]", 1))
    began = time.monotonic()
    result = streamflow(path, tmp_path / "engine", timeout=300)
    took = time.monotonic() - began
    assert result.returncode == 0, result.stdout[-4000:]
    history = Archive(read_federation(path).archive_path).history()
    assert len(history) == 5
    slow = [row for entry in history for row in entry.facilities if row.facility == "slow"]
    others = [row for entry in history for row in entry.facilities if row.facility != "slow"]
    assert all(row.status == "ok" and row.staleness == 0 for row in others), others
    assert "late" in [row.status for row in slow] and slow[-1].status == "ok", slow
    used = [row.round - row.staleness for row in slow if row.status == "ok"]
    assert used == sorted(set(used)), "no update twice, in order"
    late = [row for row in slow if row.staleness]
    assert late, "an update of an earlier round was averaged"
    by_round = {entry.round: entry.facilities for entry in history}
    for row in late:  # tokens are equal: its weight is the others' by (1 + staleness) ** -1/2
        fresh = next(other for other in by_round[row.round] if other.facility == "a")
        assert row.weight / fresh.weight == pytest.approx((1 + row.staleness) ** -0.5, rel=0.02) or row.weight <= 0.5
        assert row.loss_received is None
    jobs = len(used)
    assert took < 5 * SLOW, f"{jobs} jobs of the slow facility in five rounds"
    assert jobs < 5
