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

SLOW = 25.0
"""Seconds of the slow facility; the others take a few, the engine included."""


@pytest.mark.slow
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
    rows = [row for entry in history for row in entry.facilities]
    used = {
        name: [row.round - row.staleness for row in rows if row.facility == name and row.status == "ok"]
        for name in ("a", "b", "slow")
    }
    for rounds in used.values():
        assert rounds == sorted(set(rounds)), "no update twice, none after a later one"
    assert {row.status for row in rows} == {"ok", "late"}, "nobody failed"
    for entry in history:
        assert sum(row.status == "ok" for row in entry.facilities) >= 2, "a quorum"
    assert all(row.status == "ok" for row in history[-1].facilities), "the last round waits for all"
    assert len(used["slow"]) < 5 and took < 5 * SLOW, "rounds did not wait for the slow one"
    late = [row for row in rows if row.staleness]
    assert late, "an update of an earlier round was averaged"
    assert all(row.loss_received is None for row in late), "what it received is not this round's model"
