"""Laws of rounds that do not wait for all, over random speeds, failures, absences and kills of the engine."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streamflow.core.exception import WorkflowExecutionException
from streamflow.core.workflow import Status

from coordinator.archive.rounds import Wait
from coordinator.config.closing import ClosingSettings
from coordinator.events.event import VARIABLE
from coordinator.events.follow import EventFile
from coordinator.rounds.late import (
    LateJob,
    discount,
    forget_all,
    forget_jobs,
    read_late,
    read_wait,
    remember_job,
    remembered_job,
)
from coordinator.rounds.lost import read_lost, write_lost
from coordinator.streamflow_plugin.closing import Closing, closing_of_run
from coordinator.streamflow_plugin.errand import Errand
from coordinator.streamflow_plugin.patient_login import PatientLogin
from tests.streamflow_plugin.virtual_time import Clock

DONE = SimpleNamespace(status=Status.COMPLETED, exit_code=0)
FAILED = SimpleNamespace(status=Status.COMPLETED, exit_code=7)
CLOCK = Clock()
TICK = 0.002
"""Seconds of the unit in which speeds are drawn."""
NAMES = ("f0", "f1", "f2")


@dataclass
class World:
    """Facilities whose jobs run on whatever becomes of the engine; times are seconds of `CLOCK`."""

    speeds: list[list[int]]
    failing: set[tuple[int, int]] = field(default_factory=set)
    """(round, place) of jobs that fail."""
    away: dict[str, float] = field(default_factory=dict)
    """Until when a facility cannot be reached."""
    jobs: dict[str, tuple[str, int, float, Any]] = field(default_factory=dict)
    """By directory: facility, round, end, result."""

    def errand(self, name: str, number: int) -> Errand:
        directory = f"{name}/{number}/{len(self.jobs)}"
        place = NAMES.index(name)

        async def reach() -> None:
            while CLOCK.now < self.away.get(name, 0):
                await asyncio.sleep(TICK)

        async def execute() -> Any:
            result = FAILED if (number, place) in self.failing else DONE
            seconds = TICK * self.speeds[number % len(self.speeds)][place]
            self.jobs[directory] = (name, number, CLOCK.now + seconds, result)
            await asyncio.sleep(seconds)
            return result

        async def find(late: LateJob) -> Any | None:
            if late.directory not in self.jobs:
                return None
            *_, end, result = self.jobs[late.directory]
            await asyncio.sleep(max(0.0, end - CLOCK.now))
            return result if result is DONE else None

        return Errand(facility=name, reach=reach, execute=execute, directory=lambda: directory, find=find)

    def trained(self, directory: str) -> int:
        return self.jobs[directory][1]


@dataclass
class Engine:
    """The engine's part: in each round all facilities at once, then the next; a last round is the evaluation."""

    world: World
    handed: dict[tuple[str, int], int | None] = field(default_factory=dict)
    """By facility and complete round: the round whose job it handed on; None: nothing."""
    complete: int = 0
    ended: dict[int, float] = field(default_factory=dict)
    """By round, when the last of its steps ended."""

    async def everything(self, closing: Closing) -> None:
        for number in range(self.complete, closing.rounds + 1):
            told = await asyncio.gather(*(self._step(closing, name, number) for name in NAMES))
            self.handed |= {(name, number): one for name, one in zip(NAMES, told, strict=True)}
            self.complete = number + 1

    async def _step(self, closing: Closing, name: str, number: int) -> int | None:
        job: Any = SimpleNamespace(
            name=f"/rounds/train_{name}/0.{number}", inputs={INPUT: SimpleNamespace(value=number)}
        )
        result = await closing.run(job, self.world.errand(name, number))
        self.ended[number] = CLOCK.now
        await asyncio.sleep(2 * TICK)  # a job may end between its round's closing and the engine's look at what it left
        directory = closing.directory(job)
        assert (directory is None) == (result is None)
        return None if directory is None else self.world.trained(directory)

    def used(self, name: str) -> list[int]:
        """Rounds whose update was handed to a complete round, in that order; without the evaluation's."""
        return [
            one
            for (who, _), one in sorted(self.handed.items(), key=lambda pair: pair[0][1])
            if who == name and one is not None
        ]


INPUT = "round"


def run(closing: Closing, speeds: list[list[int]], **world: Any) -> Engine:
    engine = Engine(World(speeds, **world))
    CLOCK.run(engine.everything(closing))
    return engine


def closing_of(folder: Path | None = None, **settings: Any) -> Closing:
    rounds, fewest = settings.pop("rounds", 4), settings.pop("fewest", 1)
    asked = ClosingSettings(**({"late": "carry"} | settings))
    closing = Closing(asked, rounds=rounds, facilities=3, most_late=2, fewest=fewest)
    if folder is not None:
        closing.workdir = folder
    return closing


SPEEDS = st.lists(st.lists(st.integers(1, 12), min_size=3, max_size=3), min_size=4, max_size=4)


@settings(max_examples=25, deadline=None)
@given(speeds=SPEEDS, quorum=st.integers(1, 2), grace=st.sampled_from([0.0, 2 * TICK]))
def test_carried_every_job_is_handed_on_once_and_in_order(speeds: list[list[int]], quorum: int, grace: float):
    engine = run(closing_of(quorum=quorum, grace=grace), speeds)
    for name in NAMES:
        handed = [engine.handed[name, number] for number in range(5)]
        sources = [one for one in handed if one is not None]
        assert sources == sorted(set(sources)), "no update twice, none overtakes an earlier one"
        assert all(one is None or number - 2 <= one <= number for number, one in enumerate(handed)), "2 late at most"
        started = [number for who, number, *_ in engine.world.jobs.values() if who == name]
        assert sources == started, "what was started was handed on"
        assert handed[4] == 4, "the evaluation is of the final model"
    for number in range(3):
        assert sum(engine.handed[name, number] is not None for name in NAMES) >= quorum
    assert all(engine.handed[name, 3] is not None for name in NAMES), "the last round waits for all"


@settings(max_examples=25, deadline=None)
@given(speeds=SPEEDS, slow=st.integers(12, 60), quorum=st.integers(1, 2))
def test_a_round_that_waits_for_one_is_open_to_all_others(speeds: list[list[int]], slow: int, quorum: int):
    """What ended before its round did was late, for the quorum was there, though the round went on."""
    speeds[0][2] = slow
    engine = run(closing_of(quorum=quorum, grace=0.0), speeds)
    ends = {(name, number): end for name, number, end, _ in engine.world.jobs.values()}
    for (name, number), handed in engine.handed.items():
        if handed is None:
            job = next(one for later in range(number, 5) if (one := engine.handed[name, later]) is not None)
            assert ends[name, job] >= engine.ended[number], (
                f"{name} is late in round {number}, which ended after its job"
            )


@settings(max_examples=25, deadline=None)
@given(
    speeds=SPEEDS,
    quorum=st.integers(1, 2),
    kills=st.lists(st.integers(1, 25), max_size=3),
    failing=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=2),
)
def test_killed_at_any_moment_no_late_update_is_lost_or_used_twice(
    speeds: list[list[int]], quorum: int, kills: list[int], failing: set[tuple[int, int]]
):
    """A kill forgets the engine's memory; jobs run on; the next engine goes on after the last complete round."""
    engine = Engine(World(speeds, failing))

    async def until_killed(closing: Closing, seconds: float) -> None:
        task = asyncio.ensure_future(engine.everything(closing))
        await asyncio.wait([task], timeout=seconds)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    with tempfile.TemporaryDirectory() as folder:
        for ticks in kills:
            CLOCK.run(until_killed(closing_of(Path(folder), quorum=quorum, grace=0.0), ticks * TICK))
        CLOCK.run(engine.everything(closing_of(Path(folder), quorum=quorum, grace=0.0)))
    for name in NAMES:
        used = engine.used(name)
        assert used == sorted(set(used)), "no update twice, none overtakes an earlier one"
        place = NAMES.index(name)
        for number in range(4):
            if engine.handed[name, number] is None and (number, place) not in failing and number not in used:
                assert any(one < number for one in used if one >= number - 2) or any(
                    (one, place) in failing for one in range(number)
                ), f"{name} was late in round {number}: its job of that round or of one before is used"


def test_after_a_kill_a_late_update_is_found_where_it_was_left(tmp_path: Path):
    """Round 0 closes without f2, whose job ends after the engine was killed; the next engine uses it in round 1."""
    engine = Engine(World([[1, 1, 500], [4, 4, 4], [1, 1, 1], [1, 1, 1]]))

    async def killed_in_round_1() -> None:
        task = asyncio.ensure_future(engine.everything(closing_of(tmp_path, quorum=2, grace=0.0)))
        while engine.complete < 1:
            await asyncio.sleep(TICK)
        task.cancel()

    CLOCK.run(killed_in_round_1())
    assert engine.handed["f2", 0] is None
    left = remembered_job(tmp_path, "f2")
    assert left is not None and (left.round, left.handed) == (0, None)
    CLOCK.run(engine.everything(closing_of(tmp_path, quorum=3, grace=0.0)))
    assert engine.used("f2") == [0, 2, 3, 4]
    assert sum(who == "f2" and number == 0 for who, number, *_ in engine.world.jobs.values()) == 1, "trained once"


def test_a_round_that_is_asked_for_again_gets_the_same_late_update(tmp_path: Path):
    engine = Engine(World([[1, 1, 40]] * 4))
    closing = closing_of(tmp_path, quorum=2, grace=0.0)

    async def again() -> tuple[int | None, int | None]:
        await asyncio.gather(*(engine._step(closing, name, 0) for name in NAMES))
        first = await asyncio.gather(*(engine._step(closing, name, 1) for name in NAMES))
        while first[2] is None:
            first = await asyncio.gather(*(engine._step(closing, name, 1) for name in NAMES))
        second = await asyncio.gather(*(engine._step(closing, name, 1) for name in NAMES))
        return first[2], second[2]

    assert CLOCK.run(again()) == (0, 0)


@settings(max_examples=10, deadline=None)
@given(speeds=SPEEDS)
def test_dropped_a_round_gets_updates_of_its_own_alone(speeds: list[list[int]]):
    engine = run(closing_of(quorum=1, grace=0.0, late="drop"), speeds)
    assert all(source in (None, number) for (_, number), source in engine.handed.items())


def test_dropped_a_job_that_nobody_waits_for_holds_no_round_up():
    """f2 needs 400 ticks in round 0; rounds 1 and 2 close while that job still runs."""
    engine = run(closing_of(quorum=2, grace=0.0, late="drop"), [[1, 1, 400], [1, 1, 1], [1, 1, 1], [1, 1, 1]])
    assert [engine.handed["f2", number] for number in range(4)] == [None, None, None, 3]


def test_a_facility_that_is_away_holds_no_round_up_and_begins_with_the_newest_model(tmp_path: Path):
    world = {"away": {"f2": CLOCK.now + 60 * TICK}}
    closing = closing_of(tmp_path, quorum=2, grace="auto", rounds=40, away=3 * TICK)
    engine = run(closing, [[3, 3, 3]], **world)
    handed = [engine.handed["f2", number] for number in range(40)]
    back = next(number for number, one in enumerate(handed) if one is not None)
    assert back > 1 and handed[:back] == [None] * back, "rounds closed, though `auto` sets no limit in the first two"
    assert "could not be reached" in read_late(tmp_path / "a-job", 0, "f2")
    began = [one for one in handed if one is not None]
    assert began == sorted(set(began)) and began[0] >= back - 2, "no round of which it was away is made up for"
    late = "it may come back as a round closes: that job's update is carried, as any late one"
    assert all(one is None or number - 2 <= one <= number for number, one in enumerate(handed)), late
    assert remembered_job(tmp_path, "f2") is None, "there was no job to remember"


def test_who_is_away_is_told_once_and_is_back_when_its_job_can_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The login finds it first, and answers again before the disk there does."""
    events, tries = EventFile(tmp_path / "events.jsonl"), iter(["no route", "no route", "stale file handle", ""])
    monkeypatch.setenv(VARIABLE, str(events.path))
    monkeypatch.setattr(Closing, "pause_seconds", 0.0)
    login = PatientLogin(facility="f")

    async def reach() -> None:
        if (why := next(tries)) == "no route":
            login.report_unreachable("f.example", OSError(why))
            raise WorkflowExecutionException("f.example cannot be reached, tried 1 times")
        login.report_reached()
        if why:
            assert [event.kind for event in events.new()] == ["away"], "it is of no use yet"
            raise WorkflowExecutionException(why)

    async def nothing(*_: Any) -> None:
        return

    errand = Errand(facility="f", reach=reach, execute=nothing, directory=str, find=nothing)
    asyncio.run(closing_of(quorum=1)._reach(errand))
    assert [(event.kind, event["facility"]) for event in events.new()] == [("back", "f")]


def test_away_for_ever_it_holds_not_even_the_last_round_up():
    engine = run(closing_of(quorum=2, grace=0.0, away=3 * TICK), [[1, 1, 1]], away={"f2": CLOCK.now + 3600})
    assert all(engine.handed["f2", number] is None for number in range(5))
    assert engine.complete == 5


def test_a_facility_that_is_away_holds_no_round_up_that_has_its_fewest_updates_and_no_other_job(tmp_path: Path):
    """f1 fails, so that the quorum of two could be made by f2 alone, which is away: f0's update is used now."""
    away = {"f2": CLOCK.now + 500 * TICK}
    engine = run(closing_of(tmp_path, quorum=2, grace=0.0, away=3 * TICK), [[1, 2, 1]], failing={(0, 1)}, away=away)
    assert engine.complete == 5 and CLOCK.now < away["f2"]
    assert engine.handed["f0", 0] == 0 and engine.handed["f2", 0] is None
    assert "could not be reached" in read_late(tmp_path / "a-job", 0, "f2")


def test_with_fewer_updates_than_a_round_needs_it_waits_for_who_is_away():
    back = CLOCK.now + 100 * TICK
    closing = closing_of(quorum=2, grace=0.0, away=3 * TICK, fewest=2)
    engine = run(closing, [[1, 2, 1]], failing={(0, 1)}, away={"f2": back})
    assert engine.handed["f2", 0] == 0 and CLOCK.now > back


def test_a_facility_that_fails_does_not_make_a_quorum(tmp_path: Path):
    engine = run(closing_of(tmp_path, quorum=2, grace=0.0, rounds=2), [[1, 10, 200]] * 2, failing={(0, 0)})
    assert engine.handed["f0", 0] == 0, "its step ends with its own failure"
    assert engine.handed["f2", 0] == 0, "one delivered, one failed: the third is waited for"
    engine = run(closing_of(tmp_path, quorum=2, grace=0.0, rounds=2), [[1, 10, 200]] * 2)
    assert engine.handed["f2", 0] is None and engine.handed["f2", 1] == 0
    assert "later round" in read_late(tmp_path / "a-job", 0, "f2") and read_late(tmp_path / "a-job", 1, "f2") == ""


def test_a_facility_whose_update_was_refused_makes_no_quorum_in_the_round_that_is_asked_for_again(tmp_path: Path):
    discount(tmp_path, 0, ["f0"])
    closing = closing_of(tmp_path, quorum=1, grace=0)
    engine = run(closing, [[1, 30, 60]] * 4)
    assert engine.handed["f0", 0] == 0 and engine.handed["f1", 0] == 0, "it was waited for"
    assert engine.handed["f2", 0] is None and engine.handed["f1", 1] is None, "and in the next round it is not"


def test_what_was_learned_of_times_survives_the_engine(tmp_path: Path):
    run(closing_of(tmp_path, quorum=2, grace="auto"), [[2, 2, 100]] * 4)
    assert closing_of(tmp_path, quorum=2, grace="auto").grace(5) < 80 * TICK


def test_the_step_that_commits_a_round_is_told_how_long_it_was_open(tmp_path: Path):
    """As of each round's end, as a step of the coordinator reads it from its own directory."""
    told: dict[int, Wait | None] = {}

    class Committing(Engine):
        async def everything(self, closing: Closing) -> None:
            count = closing.rounds
            for number in range(count + 1):
                await asyncio.gather(*(self._step(closing, name, number) for name in NAMES))
                told[number] = read_wait(tmp_path / "a-job", number)

    CLOCK.run(Committing(World([[2, 2, 40]] * 6)).everything(closing_of(tmp_path, quorum=2, grace="auto", rounds=5)))
    until_all = Wait(quorum=2, seconds=None)
    assert [told[number] for number in (0, 1, 4)] == [until_all] * 3, "learning, learning and the last"
    for number in (2, 3):
        wait = told[number]
        assert wait is not None and wait.learned and wait.seconds is not None and 0 <= wait.seconds < 60 * TICK
    assert told[5] is None and read_wait(tmp_path / "a-job", 3) is None, "an evaluation; another round"
    CLOCK.run(
        Committing(World([[2, 2, 40]], failing={(0, 0), (0, 1)})).everything(
            closing_of(tmp_path, quorum=2, grace=3 * TICK, rounds=2)
        )
    )
    assert told[0] is None, "there was no quorum, and the note of an earlier run is gone"
    forget_all(tmp_path)
    CLOCK.run(Committing(World([[2, 2, 40]])).everything(closing_of(tmp_path, quorum=2, grace=3 * TICK, rounds=2)))
    assert told[0] == Wait(quorum=2, seconds=3 * TICK)


def test_by_itself_the_first_two_rounds_wait_for_all_and_later_ones_do_not():
    engine = run(closing_of(quorum=2, grace="auto", rounds=5), [[2, 2, 40]] * 6)
    assert [engine.handed["f2", number] for number in (0, 1)] == [0, 1], "the present round teaches nothing of itself"
    assert engine.handed["f2", 2] is None, "too slow to be waited for"


def test_without_the_setting_no_round_closes_early(tmp_path: Path):
    assert closing_of_run(["streamflow", "run", str(tmp_path / "streamflow.yml")]) is None
    assert closing_of_run(["crossfed", "check"]) is None


def test_the_late_job_of_a_facility_that_left_is_forgotten_and_named(tmp_path: Path):
    for name in ("left", "stays"):
        remember_job(tmp_path, LateJob(facility=name, round=3, directory="/x"))
    assert [job.facility for job in forget_jobs(tmp_path, ["stays"])] == ["left"]
    assert remembered_job(tmp_path, "left") is None and remembered_job(tmp_path, "stays") is not None


def test_why_a_late_job_was_taken_for_lost_reaches_the_round_that_has_it(tmp_path: Path):
    write_lost(tmp_path, 0, "f2", "job 7 was taken for lost")  # as its queue tells, when it ends
    engine = run(closing_of(tmp_path, quorum=2, grace=0), [[1, 1, 20], [1, 1, 1]], failing={(0, 2)})
    has = next(number for number in range(4) if engine.handed["f2", number] == 0)
    assert has > 0 and read_lost(tmp_path / "a-job", has, "f2") == "job 7 was taken for lost"
    assert all(read_lost(tmp_path / "a-job", number, "f2") == "" for number in range(5) if number != has)
