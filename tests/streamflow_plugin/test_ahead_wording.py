"""Jobs ahead of their model at each scheduler, by the words of its recorded answers: the same story everywhere."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.config.ahead import AheadSettings
from coordinator.events.event import VARIABLE
from coordinator.streamflow_plugin.ahead_queue import connector_for
from coordinator.streamflow_plugin.finishing import Finishing
from tests.schedulers.recordings import recorded
from tests.schedulers.wording import ENDED, PENDING, RUNNING, WORDINGS
from tests.streamflow_plugin.test_ahead import WAIT, World, one_ahead, told

SCHEDULERS = sorted(WORDINGS)
QUEUED = 200.0
"""Seconds in the queue."""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], World]:
    """A world whose site answers as this scheduler does."""
    (tmp_path / "events").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "events"))

    def make(name: str) -> World:
        return World(tmp_path, AheadSettings(wait=WAIT), wording=WORDINGS[name])

    return make


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_job_gets_one_round_through_a_kill_and_one_that_ends_in_vain_is_replaced(
    made: Callable[[str], World], name: str
):
    world = made(name)
    try:
        world.round(0)
        world.let(QUEUED)
        world.work_through("own-1")
        first = world.waiting()
        assert world.round(1) == first and not world.site.ran, "it waits in the queue, with its round"
        world.let(QUEUED)
        world.work_through(first)
        second = world.waiting()
        world.site.begin(second)
        world.kill()
        assert world.round(2) == second, "it waits in its job, and is found by an engine that was started anew"
        assert [id for id, _ in world.site.ran] == [first, second]
        world.work_through(second)
        vain = world.waiting()
        world.site.begin(vain)
        world.site.finish(vain)
        world.let(5)
        assert [one["job"] for one in told(world, "waited") if not one["handed"]] == [vain]
        assert world.round(3) == world.site.ids[-1] != vain, "another is in the queue"
    finally:
        world.close()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_job_that_the_scheduler_does_not_know_takes_no_round(made: Callable[[str], World], name: str):
    world = made(name)
    try:
        del world.site.jobs[one_ahead(world)]
        assert world.round(1) == "own-2"
    finally:
        world.close()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_queued_job_has_not_begun_and_a_running_one_has(name: str):
    """What `submit_ahead` learns of the queue is the time between both."""
    wording = WORDINGS[name]
    states: dict[str, str] = {}
    for number, state in ((1, PENDING), (2, RUNNING), (3, ENDED)):
        id = wording.id(100 + number)
        text, code = wording.asked(id, state)
        states |= {state: wording.scheduler.read_states(text, code, [id])[id]}
        assert (wording.scheduler.ended({id: states[state]}, [id]) == [id]) == (state == ENDED)
    assert not wording.scheduler.has_begun(states[PENDING]) and wording.scheduler.has_begun(states[RUNNING])
    queue = object.__new__(connector_for(wording.scheduler))
    queue.__dict__ |= {"_begun": set(), "_steps": {}, "_ahead": None, "connector": SimpleNamespace()}
    queue._note_begins({"1": states[PENDING], "2": states[RUNNING]})
    assert queue._begun == {"2"}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_command_of_a_queue_goes_to_the_login_node(tmp_path: Path, name: str):
    """The connector of the login node knows its host by that name alone, not by that of the queue behind it."""
    wording = WORDINGS[name]
    login, asked = object(), []

    async def run(location: Any, command: list[str], **_: Any) -> tuple[str, int]:
        asked.append(location)
        return (wording.id(101), 0) if len(asked) == 1 else wording.asked(wording.id(101), RUNNING)

    (tmp_path / "job.sh").write_text("#!/bin/bash\n{{ streamflow_command }}\n")
    inner: Any = SimpleNamespace(run=run, deployment_name="facility-a-login")
    services = {"train": {"file": "job.sh", "jobName": "crossfed-f-a"}}
    queue: Any = connector_for(wording.scheduler)("facility-a", str(tmp_path), inner, None, services=services)
    place: Any = SimpleNamespace(service="train", name="queue", deployment="facility-a", wraps=login, local=False)
    streams = dict.fromkeys(("stdout", "stderr"), asyncio.subprocess.STDOUT)

    async def both() -> None:
        await queue._put("date", None, "/rounds/train_a/0.0", place, "/scratch/work/job-1", **streams)
        await queue.states_of([wording.id(101)], place)

    asyncio.run(both())
    assert len(asked) == 2 and all(one is login for one in asked)


SUBMITTED = {"pbs": "pbs-qsub-stdin", "gridengine": "gridengine-qsub-stdin"}


@pytest.mark.parametrize("name", sorted(SUBMITTED))
@pytest.mark.parametrize("ahead", [False, True], ids=["round", "ahead"])
def test_what_a_job_prints_lies_in_its_own_directory_and_not_in_home(tmp_path: Path, name: str, ahead: bool):
    """As it was recorded, PBS writes `NAME.oID` into $HOME where nothing else is said, and so does grid engine."""
    lines: list[str] = []

    async def run(location: Any, command: list[str], **_: Any) -> tuple[str, int]:
        lines.append(" ".join(command))
        return recorded(SUBMITTED[name]).out, 0

    (tmp_path / "job.sh").write_text("#!/bin/bash\n{{ streamflow_command }}\n")
    login: Any = SimpleNamespace(run=run, deployment_name="facility-a-login")
    services = {"train": {"file": "job.sh", "jobName": "crossfed-f-a" + "-ahead" * ahead}}
    queue: Any = connector_for(WORDINGS[name].scheduler)("facility-a", str(tmp_path), login, None, services=services)
    place: Any = SimpleNamespace(service="train", name="login", deployment="facility-a", wraps="login", local=False)
    workdir = "/scratch/work/" + ("ahead-1" if ahead else "job-1")
    streams = dict.fromkeys(("stdout", "stderr"), asyncio.subprocess.STDOUT)
    job = asyncio.run(queue._put("date", None, "/rounds/train_a/0.0", place, workdir, **streams))
    assert job == recorded(SUBMITTED[name]).out.strip() and len(lines) == 1
    outputs = re.findall(r"-o[ =]?[\"']?([^\s;\"']+)", lines[0].partition("qsub")[2])
    assert outputs == [f"{workdir}/crossfed-job.log"], lines
    assert re.search(r"-j[ =]?[\"']?(oe|y)", lines[0]), "both streams"
    assert name == "pbs" or " -cwd " in lines[0] and f"cd {workdir} &&" in lines[0]


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("gated", [False, True], ids=["shell", "gate"])
def test_a_job_that_is_requeued_is_told_as_one_that_waits_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, gated: bool
):
    """From the scheduler's answers: it waits, runs, waits again as after a preemption, runs again and ends."""
    wording = WORDINGS[name]
    id = wording.id(101)
    (events := tmp_path / "events").touch()
    monkeypatch.setenv(VARIABLE, str(events))
    queue = object.__new__(connector_for(wording.scheduler))
    connector = SimpleNamespace(submit_job=None) if gated else SimpleNamespace()
    queue.__dict__ |= {"_begun": set(), "_steps": {id: "/rounds/train_a"}, "_ahead": None, "connector": connector}
    for state in (PENDING, RUNNING, RUNNING, PENDING, PENDING, RUNNING, ENDED):
        text, code = wording.asked(id, state)
        queue._note_begins(wording.scheduler.read_states(text, code, [id]))
    told = [json.loads(line) for line in events.read_text().splitlines()]
    assert [(one["kind"], one["step"], one["job"]) for one in told] == [
        (kind, "/rounds/train_a", id) for kind in ("began", "requeued", "began")
    ]


@pytest.mark.parametrize(
    ("name", "state"),
    [("slurm", "SUSPENDED"), ("slurm", "COMPLETING"), ("pbs", "S"), ("pbs", "E"), ("gridengine", "s"), ("flux", "RUN")],
)
def test_a_job_that_is_suspended_or_ends_does_not_wait_again(name: str, state: str):
    assert not WORDINGS[name].scheduler.waits(state)


@pytest.mark.parametrize(("name", "state"), [("slurm", "COMPLETING"), ("pbs", "E"), ("flux", "CLEANUP")])
def test_a_scheduler_that_does_not_let_a_job_go_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, state: str
):
    """An epilog of minutes passed without a word. One of seconds needs none, and neither does a job at work."""
    scheduler = WORDINGS[name].scheduler
    (events := tmp_path / "events").touch()
    monkeypatch.setenv(VARIABLE, str(events))
    one = Finishing()

    def see(now: float, ninth: str) -> None:
        one.see({"7": state, "8": "RUNNING", "9": ninth}, now, scheduler, "facility-a")

    for now, ninth in ((0.0, state), (10.0, state), (15.0, "RUNNING")):
        see(now, ninth)
    assert not events.read_text()
    for now, ninth in ((20.0, state), (30.0, "RUNNING"), (4000.0, state)):
        see(now, ninth)
    [said] = [json.loads(line)["text"] for line in events.read_text().splitlines()]
    assert said.startswith(f"job 7 has ended its work; {scheduler.title} of facility-a") and f"({state})" in said
