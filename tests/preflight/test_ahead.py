"""`crossfed check` says of each facility what `submit_ahead` does there, and why it does nothing where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.config.ahead import AheadSettings
from coordinator.config.federation import read_federation
from coordinator.preflight import check as checking
from coordinator.preflight.ahead import CHECK, check_ahead, judged
from coordinator.preflight.row import Row, ok
from coordinator.preflight.scheduler import wanted_hours
from coordinator.rounds.ahead import write_seen
from coordinator.rounds.ahead_time import Seen
from tests.config.test_ahead import API, GATE, SLURM, write

STEADY = Seen(waits=[600.0] * 4, spans=[3000.0] * 4, runs=[2900.0] * 4)
SHORT = Seen(waits=[1.0] * 4, spans=[3000.0] * 4, runs=[2900.0] * 4)
DEPLOYMENTS = {"a": SLURM, "gated": GATE, "api": API, "plain": {"type": "ssh", "host": "h", "workdir": "/w"}}


def row_of(
    folder: Path, name: str, template: str = "", top: Any = True, seen: Seen | None = None, gate: float | None = None
) -> Row | None:
    own = {"api": False}
    (folder / "workflow").mkdir()
    federation = read_federation(write(folder / "workflow", DEPLOYMENTS, top, own))
    if seen is not None:
        write_seen(federation.workdir_path / "coordinator", name, seen)
    facility = next(one for one in federation.facilities if one.name == name)
    return check_ahead(federation, facility, wanted_hours(facility.deployment, template), gate_seconds=gate)


def test_without_the_setting_there_is_no_row(tmp_path: Path):
    assert row_of(tmp_path, "a", top=False) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [("api", "FirecREST gives no command"), ("plain", "no queue")],
)
def test_a_facility_that_cannot_is_told_with_the_reason(tmp_path: Path, name: str, words: str):
    row = row_of(tmp_path, name)
    assert row is not None and (row.verdict, row.check) == ("skipped", CHECK) and words in row.found


def test_the_moment_is_the_one_that_the_run_would_choose(tmp_path: Path):
    """By what earlier runs saw: 600 s in the queue and 3000 s to the next model are 2400 s after the begin."""
    row = row_of(tmp_path, "a", "#SBATCH --time=02:00:00", seen=STEADY)
    assert row is not None and row.verdict == "ok", row
    assert "300 s at most" in row.found and "7,200 s" in row.found and "2400 s after this one has begun" in row.found
    assert "600 s (median of 4)" in row.found


@pytest.mark.parametrize(
    ("seconds", "verdict", "words"),
    [(0.0, "warning", "lets one wait not at all"), (60.0, "warning", "at most 60 s"), (300.0, "ok", "7,200 s")],
)
def test_behind_a_gate_the_policy_says_how_long_a_job_may_wait(tmp_path, seconds: float, verdict: str, words: str):
    row = row_of(tmp_path, "gated", "#SBATCH --time=02:00:00", gate=seconds)
    assert row is not None and row.verdict == verdict and words in row.found, row
    assert verdict == "ok" or "ahead_seconds: 300" in row.fix


def test_before_the_first_round_the_queue_is_not_known(tmp_path: Path):
    unseen = row_of(tmp_path, "a", "#SBATCH --time=2:0:0")
    assert unseen is not None and unseen.verdict == "ok" and "is not known yet" in unseen.found


@pytest.mark.parametrize(
    ("wait", "limit", "seen", "words"),
    [
        (300.0, 0.0, STEADY, "nothing sets a time limit"),
        (300.0, 300.0, Seen(), "300 s of its time limit"),
        (300.0, 3100.0, STEADY, "the latest worked 2,900 s"),
        (300.0, 7200.0, SHORT, "not at all"),
    ],
)
def test_what_costs_more_than_it_gains_is_a_warning_with_its_remedy(wait: float, limit: float, seen: Seen, words: str):
    row = judged("a", AheadSettings(wait=wait), seen, limit_seconds=limit)
    assert row.verdict == "warning" and words in row.found and row.fix


def test_check_shows_the_row_of_each_facility_that_can_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    federation = read_federation(write(tmp_path, {"a": SLURM}, True))
    monkeypatch.setattr(checking, "check_connection", lambda name, deployment: ok(name, "connection", "in"))
    monkeypatch.setattr(checking, "check_site", lambda *_, **__: ([], None))
    monkeypatch.setattr(checking, "check_scheduler", lambda *_, **__: [])
    rows, _ = checking.check_facility(federation, federation.facilities[0], None, link=False)
    assert [row.check for row in rows if row.check == CHECK] == [CHECK]
