"""Laws of rounds that do not wait for all, over random speeds: no update is lost or handed on twice."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from streamflow.core.workflow import Status

from coordinator.config.closing import ClosingSettings
from coordinator.rounds.late import read_late
from coordinator.streamflow_plugin.closing import Closing, closing_of_run

DONE = SimpleNamespace(status=Status.COMPLETED, exit_code=0)
FAILED = SimpleNamespace(status=Status.COMPLETED, exit_code=7)
TICK = 0.002
"""Seconds of the unit in which speeds are drawn."""


@dataclass
class Run:
    """What the engine saw: for each facility and round, the round whose job it handed on; None: nothing."""

    handed: dict[tuple[str, int], int | None]
    started: list[tuple[str, int]]


def job(name: str, number: int) -> Any:
    return SimpleNamespace(name=f"/rounds/train_{name}/0.{number}", inputs={"round": SimpleNamespace(value=number)})


def federation(closing: Closing, speeds: list[list[int]], failing: set[tuple[int, int]] = frozenset()) -> Run:  # type: ignore[assignment]
    """The engine's part: in each round all facilities at once, then the next; a last round is the evaluation."""
    run = Run({}, [])

    async def facility(number: int, place: int) -> None:
        name, mine = f"f{place}", job(f"f{place}", number)

        async def execute() -> Any:
            run.started.append((name, number))
            await asyncio.sleep(TICK * speeds[number % len(speeds)][place])
            return FAILED if (number, place) in failing else DONE

        result = await closing.run(mine, execute)
        await asyncio.sleep(2 * TICK)  # a job may end between its round's closing and the engine's look at what it left
        source = closing.source(mine)
        assert (source is None) == (result is None)
        run.handed[name, number] = None if source is None else int(source.name.rpartition(".")[2])

    async def everything() -> None:
        for number in range(closing.rounds + 1):
            await asyncio.gather(*(facility(number, place) for place in range(len(speeds[0]))))

    asyncio.run(everything())
    return run


SPEEDS = st.lists(st.lists(st.integers(1, 12), min_size=3, max_size=3), min_size=4, max_size=4)


@settings(max_examples=25, deadline=None)
@given(speeds=SPEEDS, quorum=st.integers(1, 2), grace=st.sampled_from([0.0, 2 * TICK]))
def test_carried_every_job_is_handed_on_once_and_in_order(speeds: list[list[int]], quorum: int, grace: float):
    closing = Closing(ClosingSettings(quorum=quorum, grace=grace, late="carry"), rounds=4, facilities=3, most_late=2)
    run = federation(closing, speeds)
    for name in ("f0", "f1", "f2"):
        handed = [run.handed[name, number] for number in range(5)]
        sources = [one for one in handed if one is not None]
        assert sources == sorted(set(sources)), "no update twice, none overtakes an earlier one"
        assert all(one is None or number - 2 <= one <= number for number, one in enumerate(handed)), "2 late at most"
        assert sources == [number for who, number in run.started if who == name], "what was started was handed on"
        assert handed[4] == 4, "the evaluation is of the final model"
    for number in range(3):
        assert sum(run.handed[name, number] is not None for name in ("f0", "f1", "f2")) >= quorum
    assert all(run.handed[name, 3] is not None for name in ("f0", "f1", "f2")), "the last round waits for all"


@settings(max_examples=10, deadline=None)
@given(speeds=SPEEDS)
def test_dropped_a_round_gets_updates_of_its_own_alone(speeds: list[list[int]]):
    closing = Closing(ClosingSettings(quorum=1, grace=0.0, late="drop"), rounds=4, facilities=3, most_late=2)
    run = federation(closing, speeds)
    assert all(source in (None, number) for (_, number), source in run.handed.items())


def test_a_facility_that_fails_does_not_make_a_quorum(tmp_path: Path):
    closing = Closing(ClosingSettings(quorum=2, grace=0.0, late="carry"), rounds=2, facilities=3, most_late=2)
    closing.workdir = tmp_path
    run = federation(closing, [[1, 6, 40]] * 2, failing={(0, 0)})
    assert run.handed["f0", 0] == 0, "its step ends with its own failure"
    assert run.handed["f2", 0] == 0, "one delivered, one failed: the third is waited for"
    closing = Closing(ClosingSettings(quorum=2, grace=0.0, late="carry"), rounds=2, facilities=3, most_late=2)
    closing.workdir = tmp_path
    run = federation(closing, [[1, 6, 40]] * 2)
    assert run.handed["f2", 0] is None and run.handed["f2", 1] == 0
    assert "later round" in read_late(tmp_path / "a-job", 0, "f2") and read_late(tmp_path / "a-job", 1, "f2") == ""


def test_without_the_setting_no_round_closes_early(tmp_path: Path):
    assert closing_of_run(["streamflow", "run", str(tmp_path / "streamflow.yml")]) is None
    assert closing_of_run(["crossfed", "check"]) is None
