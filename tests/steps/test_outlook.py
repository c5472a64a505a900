"""What elastic steps are expected to mean, as `crossfed plan`, `check` and `explain` say it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.archive.journal import Entry
from coordinator.archive.rounds import RoundFile
from coordinator.config.federation import Federation, read_federation
from coordinator.plan import main as plan
from coordinator.preflight.elastic import check_clock, check_elastic, check_elastic_steps, outlook_if_elastic
from coordinator.preflight.facility import clock_ahead
from coordinator.steps.outlook import explained, outlook
from facility.exchange.errors import ConfigurationError
from tests.federations import write_federation
from tests.steps.test_even import BATCH, LENGTH, Speed, entry

STEPS = 100
SPEEDS = {"a": Speed(1.0), "b": Speed(1.0)}
VARIED, STEADY = [(0.0, 40.0), (80.0, 40.0)], [(40.0, 40.0), (40.0, 40.0)]


def elastic(folder: Path, **changes: Any) -> Federation:
    given = {"rounds": {"count": 9, "steps": "elastic"}, "training": {"steps": STEPS}} | changes
    return read_federation(write_federation(folder, ["a", "b"], **given))


def lived(waits: list[tuple[float, float]], nodes: int = 1) -> tuple[list[RoundFile], list[Entry]]:
    """Rounds of 100 steps of 1 s, of jobs of 110 s on so many nodes that waited so long in their queue."""
    history, entries = [], []
    for number, each in enumerate(waits):
        one = entry(number, SPEEDS, dict.fromkeys(SPEEDS, STEPS))
        rows = [dataclasses.replace(row, usage={"node_seconds": nodes * row.seconds}) for row in one.facilities]
        history.append(dataclasses.replace(one, facilities=rows))
        for name, wait in zip(SPEEDS, each, strict=True):
            began = 1000.0 * number
            entries += [
                Entry(time=began, kind="queued", facility=name, round=number),
                Entry(time=began + wait + 110, kind="transferred", facility=name, round=number, detail={"seconds": 0}),
            ]
    return history, entries


def test_of_a_facility_that_was_not_timed_the_bounds_are_known(tmp_path: Path):
    found = outlook(elastic(tmp_path), history=[], entries=[])
    assert {(one.nominal, one.least, one.most, one.timed) for one in found.facilities.values()} == {
        (STEPS, 25, 400, None)
    }
    assert found.end_seconds is None and found.tokens_a_day is None and not found.weights()
    assert "not timed" in found.table() and "the next round takes training.steps" in found.table()


def test_steps_are_expected_over_the_waits_that_were_seen(tmp_path: Path):
    """A round is to end after 150.5 s: a, which needed 10 and 90 s beside training, takes 140 and 60 whole steps."""
    history, entries = lived(VARIED, nodes=3)
    found = outlook(elastic(tmp_path), history=history, entries=entries)
    a, b = (found.facilities[name].timed for name in "ab")
    assert a is not None and b is not None
    assert found.end_seconds == pytest.approx(150.5)
    assert (a.fewest, a.most, a.steps) == (60, 140, pytest.approx(100.0))
    assert (b.fewest, b.most, b.steps) == (100, 100, pytest.approx(100.0))
    assert (a.nodes, a.own_seconds, a.seconds_per_step) == (3, 10.0, 1.0)
    assert a.node_hours(400) == pytest.approx(3 * 410 / 3600)
    assert found.weights() == pytest.approx({"a": 0.5, "b": 0.5})
    assert found.tokens_a_day is not None and found.equal_tokens_a_day is not None
    equal = 2 * STEPS * BATCH * LENGTH * 86400 / ((150 + 190) / 2)
    assert found.equal_tokens_a_day == pytest.approx(equal, rel=0.03), "a is held in its queue every other round"
    assert found.tokens_a_day > 1.1 * found.equal_tokens_a_day
    assert "1.1" in found.remarks[-1]
    assert "0.0917 (0.0292 to 0.342)" in found.table(), "node-hours of 100 steps, of 25 and of 400"


@pytest.mark.slow
def test_where_no_wait_varies_nothing_is_gained_and_that_is_said(tmp_path: Path):
    history, entries = lived(STEADY)
    found = outlook(elastic(tmp_path), history=history, entries=entries)
    assert found.tokens_a_day == pytest.approx(2 * STEPS * BATCH * LENGTH * 86400 / 150)
    assert found.equal_tokens_a_day == pytest.approx(found.tokens_a_day)
    assert "varied by 0.0% of a round" in found.remarks[-1] and "steps: auto" in found.remarks[-1]


@pytest.mark.slow
def test_a_queue_that_is_given_stands_for_those_seen(tmp_path: Path):
    history, entries = lived(STEADY)
    federation = elastic(tmp_path)
    found = outlook(federation, queues={"b": 140.0}, history=history, entries=entries)
    assert found.end_seconds == pytest.approx(200.5)
    assert found.facilities["b"].timed.steps == pytest.approx(50.0)  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match="the facilities are a, b"):
        outlook(federation, queues={"c": 1.0}, history=history, entries=entries)


def test_the_plan_of_a_federation_whose_steps_are_elastic_is_that_and_advises_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    federation = elastic(tmp_path)
    arguments = ["--problem", str(federation.file), "--out", str(tmp_path / "plan.json")]
    assert plan(arguments) == 0
    said = capsys.readouterr().out
    assert "25 to 400" in said and "set training.steps" not in said
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["steps"] == "elastic" and written["facilities"]["a"]["most"] == 400
    with pytest.raises(ConfigurationError, match="change those"):
        plan([*arguments, "--batch-samples", "7"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"aggregation": {"weights": "equal"}}, "weights is equal"),
        ({"aggregation": {"weights": {"a": 1.0, "b": 2.0}}}, "given by facility"),
        ({"rounds": {"count": 9, "steps": "elastic", "least_steps": 1, "most_steps": 1}}, "bounds leave"),
    ],
)
def test_check_says_where_elastic_steps_change_nothing(tmp_path: Path, changes: dict[str, Any], words: str | None):
    federation = elastic(tmp_path, **changes)
    (row,) = check_elastic(federation, outlook_if_elastic(federation))
    assert row.verdict == ("warning" if words else "ok") and (words or "") in row.found


def test_check_says_that_one_facility_waits_for_nobody_and_nothing_of_steps_that_are_fixed(tmp_path: Path):
    rounds = {"count": 3, "steps": "elastic"}
    alone = read_federation(write_federation(tmp_path / "one", ["a"], rounds=rounds))
    (row,) = check_elastic(alone, outlook_if_elastic(alone))
    assert row.verdict == "warning" and "waits for no other" in row.found
    fixed = read_federation(write_federation(tmp_path / "two", ["a", "b"], rounds=3))
    assert outlook_if_elastic(fixed) is None
    assert check_elastic(fixed, None) == [] and check_elastic_steps(None, "a", 1.0) is None


@pytest.mark.slow
@pytest.mark.parametrize(("hours", "verdict"), [(0.0, "ok"), (410 / 3600 + 1e-6, "ok"), (0.1, "warning")])
def test_check_compares_the_longest_job_with_its_time_limit(tmp_path: Path, hours: float, verdict: str):
    history, entries = lived(VARIED)
    found = outlook(elastic(tmp_path), history=history, entries=entries)
    row = check_elastic_steps(found, "a", hours)
    assert row is not None and row.verdict == verdict and "25 to 400 steps a round" in row.found
    assert "about 100 expected, 60 to 140" in row.found
    if verdict == "warning":
        assert "400 steps take 410 s, of which 360 s" in row.found and "350 steps fit" in row.fix


def test_explain_says_what_bounds_a_facilitys_steps(tmp_path: Path):
    text = "\n".join(explained(elastic(tmp_path), "a"))
    assert "25 to 400" in text and "training.steps is 100" in text and "takes training.steps" in text


@pytest.mark.parametrize(
    ("told", "seconds"),
    [("1000", 0.0), ("1003", 0.0), ("999", 0.0), ("1304", 300.0), ("699", -300.0), ("", 0.0), ("motd", 0.0)],
)
def test_a_clock_is_off_by_what_cannot_be_the_probes_own_time(told: str, seconds: float):
    assert clock_ahead(f" {told}", before=1000.0, after=1004.0) == seconds


def test_check_warns_of_a_clock_that_shifts_the_common_end(tmp_path: Path):
    found = outlook_if_elastic(elastic(tmp_path))
    assert check_clock(found, "a", 9.0) == check_clock(None, "a", 900.0) == []
    (ahead,), (behind,) = check_clock(found, "a", 900.0), check_clock(found, "a", -900.0)
    assert ahead.verdict == behind.verdict == "warning"
    assert "900 s ahead" in ahead.found and "fewer steps" in ahead.found
    assert "900 s behind" in behind.found and "more steps" in behind.found
