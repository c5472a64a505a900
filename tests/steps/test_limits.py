"""A deadline and a budget in node-hours end a federation in order, before they are exceeded, at the best model."""

from __future__ import annotations

import dataclasses
import math
import time
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.archive.best import best_round
from coordinator.archive.journal import Entry
from coordinator.archive.remarks import summary_remarks
from coordinator.archive.rounds import Archive, FacilityRow, RoundFile
from coordinator.archive.summary import summary
from coordinator.config.closing import LimitSettings
from coordinator.config.evaluation import ComparisonSettings
from coordinator.config.federation import read_federation
from coordinator.config.settings import CoordinatorSettings
from coordinator.durations import format_duration
from coordinator.report.timeline import segments
from coordinator.steps.limits import exceeded, job_seconds, node_seconds, nodes_of, round_seconds, seconds_of
from coordinator.steps.start import start
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.messages.plausible import MOST_NODES
from facility.exchange.messages.usage import Usage, with_usage
from tests.aggregation.updates import write_update
from tests.federations import write_federation
from tests.pico import save_pico
from tests.steps.test_aggregate_step import close

NOON = datetime.fromisoformat("2026-12-24T12:00:00+00:00").timestamp()


def entry(number: int, *, seconds: float = 60.0, node: float = 3600.0, evaluate: float = 0.0) -> RoundFile:
    row = FacilityRow(
        round=number, facility="a", status="ok", usage={"node_seconds": node}, phases={"evaluate": evaluate}
    )
    return RoundFile(round=number, facilities=[row], global_loss=2.0, decision="go on", seconds=seconds)


@given(
    lengths=st.lists(st.floats(1, 1000), min_size=1, max_size=30),
    node_hours=st.floats(0.1, 50),
    left=st.floats(1, 20_000),
)
def test_where_rounds_are_all_alike_no_limit_is_exceeded(lengths: list[float], node_hours: float, left: float):
    """Rounds of one length and cost each, begun while the rule lets them: the last ends within both limits."""
    seconds = lengths[0]
    limits = LimitSettings(deadline="2026-12-24 12:00+00:00", node_hours=node_hours)
    history: list[RoundFile] = []
    now = NOON - left
    while len(history) < 40 and exceeded(limits, history, now, evaluates=False) is None:
        history.append(entry(len(history), seconds=seconds, node=4 * seconds))
        now += seconds
    spent = sum(node_seconds(one) for one in history) / 3600
    if len(history) > 1:  # of the first round nothing is known, and it is begun
        assert now <= NOON + 1e-3 and spent <= node_hours + 1e-9
    if len(history) < 40:
        assert now + round_seconds(history) > NOON - 1e-3 or spent + seconds / 900 > node_hours - 1e-9 or now >= NOON


def test_the_rule_by_hand():
    limits = LimitSettings(deadline="2026-12-24 12:00+00:00", node_hours=10)
    history = [entry(number, seconds=one) for number, one in enumerate((900, 100, 100, 110, 120, 0))]
    assert round_seconds(history) == 110, "median of the last five that were timed"
    assert exceeded(limits, history, NOON - 111, evaluates=False) is None
    assert exceeded(limits, history, NOON - 110, evaluates=False) is None, "just so"
    found = exceeded(limits, history, NOON - 109, evaluates=False)
    assert found is not None and found.limit == "deadline"
    assert format_duration(110) in found.reason and format_duration(109) in found.reason
    slow = [entry(number, seconds=100, evaluate=60) for number in range(3)]
    assert exceeded(limits, slow, NOON - 120, evaluates=False) is None, "there is time for the round"
    assert exceeded(limits, slow, NOON - 120, evaluates=True) is not None, "but not for an evaluation of 30 s too"
    many = [entry(number) for number in range(9)]
    assert exceeded(limits, many, NOON - 9999, evaluates=False) is None, "9 of 10 node-hours, the next needs 1"
    found = exceeded(limits, [*many, entry(9)], NOON - 9999, evaluates=False)
    assert found is not None and found.limit == "node_hours" and "10 of 10 node-hours" in found.reason
    assert exceeded(limits, many, NOON - 9999, evaluates=False, waited=1.0) is not None, "a job waited for its model"
    assert exceeded(limits, [], NOON - 9999, evaluates=False, waited=36_000.0) is not None, "all by such jobs"
    many = [entry(number, evaluate=900) for number in range(9)]
    assert exceeded(limits, many, NOON - 9999, evaluates=False) is None, "no evaluation follows"
    assert exceeded(limits, many, NOON - 9999, evaluates=True) is not None
    assert exceeded(limits, [], NOON + 1, evaluates=False) is not None, "a deadline that has passed"
    assert exceeded(limits, [], NOON - 1, evaluates=False) is None, "of the first round nothing is known"


@given(
    node_hours=st.floats(1, 9),
    nodes=st.integers(1, 8),
    train=st.floats(60, 900),
    check=st.floats(0, 900),
    count=st.integers(1, 3),
)
def test_the_final_evaluation_is_within_the_node_hours_too(
    node_hours: float, nodes: int, train: float, check: float, count: int
):
    """Each of `count` facilities loads and evaluates for `check` seconds, once more after the last round."""
    row = FacilityRow(
        round=0,
        facility="a",
        status="ok",
        seconds=train + 2 * check,
        usage={"node_seconds": nodes * (train + 2 * check)},
        phases={"load": 0.0, "evaluate": 2 * check, "train": train},
    )
    rows = [dataclasses.replace(row, facility=str(place)) for place in range(count)]
    limits, history = LimitSettings(node_hours=node_hours), list[RoundFile]()
    while len(history) < 30 and exceeded(limits, history, NOON, evaluates=True) is None:
        history.append(RoundFile(round=len(history), facilities=rows, global_loss=2.0, decision="go on"))
    spent = sum(node_seconds(one) for one in history) + count * nodes * check
    if 1 < len(history) < 30:
        assert spent <= 3600 * node_hours * (1 + 1e-9)
        assert spent + count * row.usage["node_seconds"] > 3600 * node_hours * (1 - 1e-9), "one more would not fit"


def test_what_one_facility_says_of_its_evaluation_ends_no_federation():
    """A report of a thousand million seconds counts for no more than the round, which the coordinator timed."""
    limits = LimitSettings(deadline="2026-12-24 12:00+00:00")
    lies = [entry(number, seconds=100, evaluate=1e9) for number in range(3)]
    assert exceeded(limits, lies, NOON - 201, evaluates=True) is None
    assert exceeded(limits, lies, NOON - 199, evaluates=True) is not None


@pytest.mark.parametrize("seconds", [1e-300, 1e-9, 0.0, 4e9])
def test_a_job_of_no_time_and_many_node_seconds_has_no_endless_nodes(seconds: float):
    """A facility divides its node-seconds by a time that it states itself; the quotient ended the round for all."""
    row = FacilityRow(round=0, facility="a", status="ok", seconds=seconds, usage={"node_seconds": 1e12})
    told = RoundFile(round=0, facilities=[row], global_loss=2.0, decision="go on", seconds=60.0)
    assert 1 <= row.nodes <= MOST_NODES and math.isfinite(node_seconds(told, {(0, "a"): 60.0}))
    assert exceeded(LimitSettings(node_hours=10), [told], NOON, evaluates=False, jobs={(0, "a"): 60.0}) is not None
    assert dataclasses.replace(row, usage={}).nodes == 1
    assert dataclasses.replace(row, seconds=50.0, usage={"node_seconds": 199.0}).nodes == 4


def test_a_job_that_takes_long_to_start_is_charged_for_the_nodes_that_it_had():
    """Four nodes for an hour, ten minutes of it before the trainer began: they counted as five, and as 5 node-hours."""
    usage = {"node_seconds": 4 * 3600.0, "nodes": 4}
    row = FacilityRow(round=0, facility="a", status="ok", seconds=3000.0, usage=usage)
    told = RoundFile(round=0, facilities=[row], global_loss=2.0, decision="go on", seconds=3700.0)
    assert node_seconds(told, {(0, "a"): 3600.0}) == 4 * 3600.0 and nodes_of([told]) == {"a": 4}
    assert dataclasses.replace(row, usage=usage | {"nodes": 1000}).nodes == 5, "never more than its figures allow"


def test_jobs_that_failed_or_were_cut_off_are_paid_for_too():
    """a used 2 nodes for 60 s as it reports, and one job of it failed after 40 s; b reports nothing of its 30 s."""
    told = [
        Entry(time=0.0, kind="started", facility="a", round=0),
        Entry(time=5.0, kind="started", facility="b", round=0),
        Entry(time=35.0, kind="trained", facility="b", round=0),
        Entry(time=40.0, kind="trained", facility="a", round=0),
        Entry(time=50.0, kind="started", facility="a", round=0),
        Entry(time=110.0, kind="trained", facility="a", round=0),
        Entry(time=120.0, kind="started", facility="a", round=1),
        Entry(time=150.0, kind="run_ended"),
    ]
    jobs = job_seconds(told)
    assert jobs == {(0, "a"): 100.0, (0, "b"): 30.0, (1, "a"): 30.0}
    rows = [
        FacilityRow(round=0, facility="a", status="ok", seconds=60.0, usage={"node_seconds": 120.0}),
        FacilityRow(round=0, facility="b", status="failed"),
    ]
    one = RoundFile(round=0, facilities=rows, global_loss=None, decision="go on")
    assert node_seconds(one) == 120.0 and node_seconds(one, jobs) == 200.0 + 30.0


def test_a_clock_that_is_set_back_while_a_job_runs_takes_nothing_off_the_others():
    """It was seen to end an hour before it began; an attempt before it took 100 s."""
    told = [
        Entry(time=5000.0, kind="started", facility="a", round=0),
        Entry(time=5100.0, kind="trained", facility="a", round=0),
        Entry(time=5200.0, kind="started", facility="a", round=0),
        Entry(time=1700.0, kind="trained", facility="a", round=0),
    ]
    assert job_seconds(told) == {(0, "a"): 100.0}


def test_a_job_of_a_killed_run_is_paid_for_until_its_time_limit_and_not_until_the_next_run():
    """The run dies on Friday while jobs run, and is started again after the weekend. A job of b, of which no limit is
    known, may have run all the time; that of c was seen to end after its limit, as a queue that is asked late shows."""
    weekend = 60 * 3600.0
    told = [
        Entry(time=0.0, kind="run_started", detail={"rounds": 0, "limits": {"a": 7200.0, "c": 50.0}}),
        *(Entry(time=100.0, kind="started", facility=name, round=0) for name in "abc"),
        Entry(time=160.0, kind="trained", facility="c", round=0),
        Entry(time=weekend, kind="run_started", detail={"rounds": 0, "limits": {"a": 10.0}}),
        Entry(time=weekend + 5.0, kind="started", facility="a", round=0),
        Entry(time=weekend + 25.0, kind="trained", facility="a", round=0),
    ]
    assert job_seconds(told) == {(0, "a"): 7200.0 + 20.0, (0, "b"): weekend - 100.0, (0, "c"): 60.0}
    lost = {one.facility: one.seconds for one in segments(told, {}) if one.kind == "lost"}
    assert lost == {"a": 7200.0, "b": weekend - 100.0}, "the report's timeline says the same"


@pytest.mark.parametrize("began", [0, 1], ids=["at once", "after a round in its queue"])
def test_a_late_job_is_paid_for_once(began: int):
    """It used 2 node-hours, was seen in the rounds that closed without it, and reports them in the one it came in."""
    told = [
        Entry(time=0.0, kind="started", facility="a", round=began),
        Entry(time=3600.0, kind="trained", facility="a", round=2),
    ]
    late = FacilityRow(round=0, facility="a", status="late")
    there = FacilityRow(round=2, facility="a", status="ok", staleness=2, seconds=3600.0, usage={"node_seconds": 7200.0})
    history = [
        RoundFile(round=number, facilities=[dataclasses.replace(row, round=number)], global_loss=None, decision="go on")
        for number, row in enumerate((late, late, there))
    ]
    jobs = job_seconds(told)
    assert exceeded(LimitSettings(node_hours=2.01), history, NOON, evaluates=False, jobs=jobs) is None
    assert exceeded(LimitSettings(node_hours=1.99), history, NOON, evaluates=False, jobs=jobs) is not None
    found = exceeded(LimitSettings(node_hours=0.99), history[:2], NOON, evaluates=False, jobs=jobs)
    assert found is not None, "until then, as it was seen"


def test_jobs_that_report_nothing_are_paid_for_with_the_nodes_of_those_that_did_and_running_ones_too():
    """a uses 4 nodes: its job of round 1 failed after an hour, that of round 2 is late and has run for another."""
    told = [
        Entry(time=0.0, kind="started", facility="a", round=1),
        Entry(time=3600.0, kind="trained", facility="a", round=1),
        Entry(time=4000.0, kind="started", facility="a", round=2),
        Entry(time=7600.0, kind="averaged", round=2),
    ]
    assert job_seconds(told) == {(1, "a"): 3600.0}, "what a report shows has ended"
    jobs = job_seconds(told, running=True)
    assert jobs == {(1, "a"): 3600.0, (2, "a"): 3600.0}
    rows = [
        FacilityRow(round=0, facility="a", status="ok", seconds=3600.0, usage={"node_seconds": 4 * 3600.0}),
        FacilityRow(round=1, facility="a", status="failed"),
        FacilityRow(round=2, facility="a", status="late"),
    ]
    history = [RoundFile(round=row.round, facilities=[row], global_loss=None, decision="go on") for row in rows]
    assert exceeded(LimitSettings(node_hours=16.01), history, NOON, evaluates=False, jobs=jobs) is None
    assert exceeded(LimitSettings(node_hours=15.99), history, NOON, evaluates=False, jobs=jobs) is not None


def test_an_interrupted_round_is_no_measure():
    assert seconds_of({"round": 3, "since": 100.0, "whole": True}, 3, 160.0) == 60
    assert seconds_of({"round": 3, "since": 100.0, "whole": False}, 3, 160.0) == 0
    assert seconds_of({"round": 2, "since": 100.0, "whole": True}, 3, 160.0) == seconds_of({}, 3, 160.0) == 0


def test_the_best_round_is_the_latest_of_equal_ones():
    assert best_round([3.0, 2.0, None, 2.0, math.nan, 2.5]) == 3
    assert best_round([None, math.inf]) is None


@pytest.fixture
def limited(tmp_path: Path) -> tuple[Archive, CoordinatorSettings]:
    """Four rounds wanted, node-hours for two; losses of the models received 4, 2 and, at the end, 3."""
    archive = Archive(tmp_path / "archive")
    settings = CoordinatorSettings(
        federation="f", rounds=4, facilities=["a"], keep_rounds=1, limits=LimitSettings(node_hours=2.5 / 3600)
    )
    model, _, _ = start(archive, save_pico(tmp_path / "model", dtype="bfloat16"), settings)
    for number, loss in enumerate((4.0, 2.0)):
        update = write_update(tmp_path / f"a{number}", model, "a", round=number, loss=loss, move=0.01)
        with_usage(update, Usage(node_seconds=1.0))
        model, following, proceed = close(archive, model, [update], settings, number)
    assert (following, proceed) == (4, True), "the final evaluation follows"
    evaluation = write_update(tmp_path / "e", model, "a", round=4, loss=3.0)
    close(archive, model, [evaluation], settings, 4)
    return archive, settings


def test_ended_by_its_budget_it_ends_at_the_best_model_and_says_so(limited: tuple[Archive, CoordinatorSettings]):
    archive, settings = limited
    assert archive.rounds() == [0, 1] and archive.read_round(1).ended
    assert "node-hours are spent" in archive.read_round(1).decision
    data = summary(archive)
    assert data["model"] == str(archive.model_for(1)), "received by round 1 with loss 2, better than the last with 3"
    assert archive.model_for(1).is_dir(), "kept though keep_rounds is 1"
    assert data["stopped"] is None, "an end in order"
    assert any("best model, which is that of round 0" in line for line in summary_remarks(data))
    assert start(archive, archive.path.parent / "model", settings)[2] is False, "nothing left to do"


def test_with_a_larger_budget_it_goes_on(limited: tuple[Archive, CoordinatorSettings], tmp_path: Path):
    archive, _ = limited
    more = CoordinatorSettings(federation="f", rounds=4, facilities=["a"], limits=LimitSettings(node_hours=1))
    model, number, proceed = start(archive, tmp_path / "model", more)
    assert (model, number, proceed) == (archive.model_for(2), 2, True)
    assert summary(archive)["model"] == str(archive.model_for(2)), "no longer ended"
    assert start(archive, tmp_path / "model", more)[1:] == (2, True), "killed in that round, it goes on with it"
    less = dataclasses.replace(more, limits=LimitSettings(node_hours=2.5 / 3600))
    assert start(archive, tmp_path / "model", less)[2] is False and summary(archive)["limited"], "and ends again"
    assert start(archive, tmp_path / "model", more)[1:] == (2, True)


def test_killed_as_the_round_that_a_budget_ends_appears_it_is_ended_by_the_budget_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It ends at the best model, with every facility's update kept to be compared, and a larger budget goes on."""
    settings = CoordinatorSettings(
        federation="f",
        rounds=4,
        facilities=["a"],
        limits=LimitSettings(node_hours=1.5 / 3600),
        comparison=ComparisonSettings(),
    )
    archive = Archive(tmp_path / "archive")
    model, _, _ = start(archive, save_pico(tmp_path / "model", dtype="bfloat16"), settings)
    update = write_update(tmp_path / "a", model, "a", loss=4.0, move=0.01)
    with_usage(update, Usage(node_seconds=1.0))

    def killed(self: Archive) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Archive, "write_history", killed)  # the first thing after the round has appeared
    with pytest.raises(KeyboardInterrupt):
        close(archive, model, [update], settings)
    monkeypatch.undo()
    assert archive.rounds() == [0] and (archive.path / "comparison" / "update.a").is_dir()
    assert start(archive, tmp_path / "model", settings)[1:] == (4, True), "the final evaluation"
    assert summary(archive)["limited"], archive.read_note("limited")
    more = dataclasses.replace(settings, limits=LimitSettings(node_hours=1))
    assert start(archive, tmp_path / "model", more)[1:] == (1, True)


def test_a_deadline_that_has_passed_begins_no_federation(tmp_path: Path):
    settings = CoordinatorSettings(
        federation="f", rounds=4, facilities=["a"], limits=LimitSettings(deadline="2020-01-01 00:00")
    )
    with pytest.raises(InputError, match=r"deadline 2020-01-01 00:00 has passed.*rounds\.deadline"):
        start(Archive(tmp_path / "archive"), save_pico(tmp_path / "model", dtype="bfloat16"), settings)


def test_limits_stand_in_rounds(tmp_path: Path):
    path = write_federation(tmp_path, ["a"], rounds={"count": 3, "deadline": "2030-12-24 18:00", "node_hours": 10})
    limits = read_federation(path).limits
    assert limits is not None and limits.seconds_until(time.time()) > 0 and read_federation(path).closing is None
    path.write_text(path.read_text().replace("2030-12-24 18:00", "tomorrow"))
    with pytest.raises(ConfigurationError, match="deadline is 'tomorrow', expected a time such as"):
        read_federation(path)
