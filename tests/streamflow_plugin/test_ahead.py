"""A job ahead of its model, in every state in which something can happen to it: no round is lost, none runs twice.

The site is a folder and a table of jobs; its answers are in the words of a scheduler, Slurm unless said otherwise.
What a job does in it is `facility.ahead`'s own code, and what the coordinator writes there goes through a real shell.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import uuid
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.config.ahead import AheadSettings
from coordinator.events.event import VARIABLE
from coordinator.rounds.ahead import remembered_placeholder
from coordinator.schedulers.scheduler import Job
from coordinator.streamflow_plugin.handing_over import Submission
from coordinator.streamflow_plugin.placeholder import Ahead
from coordinator.streamflow_plugin.this_run import RoundAtFacility
from facility.ahead import give_up
from facility.exchange.exit_codes import BROKE
from facility.exchange.messages.ahead import COMMAND, GIVEN_UP, WAITED, Waited
from tests.schedulers.wording import ENDED as OVER
from tests.schedulers.wording import WORDINGS, Wording
from tests.security.test_gate import Gate
from tests.streamflow_plugin.gated_site import gated
from tests.streamflow_plugin.virtual_time import JumpingLoop

HERE: Any = object()
WAIT, ROUNDS = 300.0, 10
ENDED = ("COMPLETED", "CANCELLED", "FAILED")


@dataclass
class Site:
    """A login node, its queue and its disk."""

    place: Path
    jobs: dict[str, dict[str, str]] = field(default_factory=dict)
    ran: list[tuple[str, str]] = field(default_factory=list)
    """Job and round of every round that ran."""
    lost: list[str] = field(default_factory=list)
    """Of the next answers: `before` the line ran, or `after`; '': not lost."""
    template: str = "one"
    nodes: int = 0
    refuses: bool = False
    deployment_name: str = "facility-a"
    pollingInterval: int = 1
    wording: Wording = field(default_factory=lambda: WORDINGS["slurm"])

    @property
    def scheduler(self) -> Any:
        return self.wording.scheduler

    @property
    def ids(self) -> list[str]:
        return list(self.jobs)

    def reach(self) -> Any:
        return None

    def submission(self, number: int) -> Submission:
        return Submission(
            command=f"cd {uuid.uuid4()} && train {number}",  # the engine's directories have new names each time
            job_name=f"/rounds/train_a/0.{number}",
            workdir=str(self.place / f"job-{number}"),
        )

    def submit_round(self, one: Submission) -> None:
        """A job as always, which is not followed here."""

    async def shell_line(self, location: Any, line: str) -> tuple[str, int]:
        if line in (cancelled := {self.scheduler.cancel_ids([id]): id for id in self.jobs}):
            self.cancel(cancelled[line])
            return "", 0
        how = self.lost.pop(0) if self.lost else ""
        if how == "before":
            return "", BROKE
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
        return ("", BROKE) if how == "after" else (done.stdout + done.stderr, done.returncode)

    async def answer_to(self, location: Any, command: str, read: Callable[[str, int], bool | None]) -> bool:
        while (found := read(*await self.shell_line(location, command))) is None:
            await asyncio.sleep(1)
        return found

    async def states_of(self, ids: list[str], location: Any) -> dict[str, str]:
        return self.scheduler.read_states(*self.wording.asked(ids[0], self._state(ids[0])), ids)

    async def placeholders(self, location: Any) -> list[Job]:
        there = {id: self._state(id) for id, one in self.jobs.items() if one["state"] not in ENDED}
        return self.scheduler.read_listing(self.wording.listed(there))

    def _state(self, id: str) -> str:
        found = self.jobs[id]["state"] if id in self.jobs else ""
        return OVER if found in ENDED else found

    async def make_way_ahead(self, location: Any, spare: str = "") -> None:
        for job in await self.placeholders(location):
            if job.id != spare and not job.began:
                self.cancel(job.id)
            elif job.id != spare:
                self.finish(job.id)  # time passes

    async def submit_ahead(self, one: Submission, location: Any) -> str:
        assert Path(one.workdir).stat().st_mode & 0o777 == 0o700
        if self.refuses:
            raise RuntimeError("sbatch: error: QOSMaxSubmitJobPerUserLimit")
        return self.submit(one.workdir)

    def template_of(self, location: Any) -> str:
        return self.template

    def nodes_of(self, location: Any) -> int:
        return self.nodes

    def submit(self, directory: str) -> str:
        id = self.wording.id(100 + len(self.jobs))
        self.jobs[id] = {"state": "PENDING", "directory": directory}
        return id

    def begin(self, id: str) -> None:
        """The job leaves the queue; it runs its round as soon as it has one."""
        if self.jobs[id]["state"] == "PENDING":
            self.jobs[id]["state"] = "RUNNING"
        self.look(id)

    def look(self, id: str, seconds: float = 5.0) -> None:
        """A job that waits looks for its round."""
        place = Path(self.jobs[id]["directory"])
        if self.jobs[id]["state"] != "RUNNING" or not (place / COMMAND).exists() or (place / WAITED).exists():
            return
        command = (place / COMMAND).read_text()
        waited = Waited(seconds=seconds, nodes=2, handed=command != GIVEN_UP)
        (place / WAITED).write_text(json.dumps(asdict(waited)))
        if waited.handed:
            self.ran.append((id, command.strip()))
        else:
            self.jobs[id]["state"] = "COMPLETED"

    def finish(self, id: str) -> None:
        """Whatever it does, it comes to its end: a round is trained, or the wait is over."""
        if self.jobs[id]["state"] == "RUNNING":
            give_up(Path(self.jobs[id]["directory"]))
            self.look(id, WAIT)
            self.jobs[id]["state"] = "COMPLETED"

    def cancel(self, id: str) -> None:
        if self.jobs[id]["state"] not in ENDED:
            self.jobs[id]["state"] = "CANCELLED"


@dataclass
class World:
    """A site and the coordinator's runs, on a clock that jumps."""

    folder: Path
    settings: AheadSettings | None = field(default_factory=lambda: AheadSettings(wait=WAIT))
    loop: JumpingLoop = field(default_factory=JumpingLoop)
    site: Site = field(init=False)
    ahead: Ahead = field(init=False)
    own: int = 0
    """Jobs that were submitted as always."""
    wording: Wording = field(default_factory=lambda: WORDINGS["slurm"])

    def __post_init__(self) -> None:
        (self.folder / "site").mkdir(parents=True)
        self.site = Site(self.folder / "site", wording=self.wording)
        self.start()

    def start(self) -> None:
        """Of the coordinator: an earlier one is gone without a word."""
        queue: Any = self.site
        self.ahead = Ahead(
            queue,
            facility="a",
            workdir=self.folder / "work",
            settings=self.settings,
            rounds=ROUNDS,
            clock=lambda: 1e9 + self.loop.now,
            reach=self.site.reach(),
        )

    def kill(self) -> None:
        self.let(0)
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.let(0)
        self.start()

    def close(self) -> None:
        self.kill()
        self.loop.close()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def let(self, seconds: float) -> None:
        """Time passes."""
        self.do(asyncio.sleep(seconds))

    def round(self, number: int) -> str:
        """The step of a round begins; returns the id of its job."""
        one = self.site.submission(number)
        job = self.do(self.ahead.take(one, HERE))
        if job is None:
            self.own += 1
            self.site.submit_round(one)
            job = f"own-{self.own}"
        else:
            self.site.look(job)
        self.do(self._follow(job, one, number))
        return job

    async def _follow(self, job: str, one: Submission, number: int) -> None:
        self.ahead.follow(job, one, HERE, RoundAtFacility(facility="a", number=number, workdir=self.folder / "work"))

    def work_through(self, job: str, seconds: float = 1000.0) -> None:
        """The round's job works and ends."""
        if job in self.site.jobs:
            self.site.begin(job)
        self.ahead.job_began(job)
        self.let(seconds)
        if job in self.site.jobs:
            self.site.finish(job)
        self.do(self.ahead.job_ended(job, HERE))
        self.let(1)

    def waiting(self) -> str:
        """The job that is ahead."""
        assert self.ahead.placeholder is not None
        return self.ahead.placeholder.job


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    """A world with these settings."""
    events, worlds = tmp_path / "events", []
    events.touch()
    monkeypatch.setenv(VARIABLE, str(events))

    def make(**settings: Any) -> World:
        worlds.append(World(tmp_path, AheadSettings(**({"wait": WAIT} | settings))))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture(params=["by shell", "by gate"])
def world(request: pytest.FixtureRequest, made: Callable[..., World]) -> World:
    """Both ways in which a job that waits is reached."""
    world = made()
    if request.param == "by gate":
        folder = world.folder / "gate"
        folder.mkdir()
        gate = Gate(folder.resolve(), request.getfixturevalue("monkeypatch"), request.getfixturevalue("capfdbinary"))
        world.site = gated(world.site, gate)
        world.start()
    return world


def told(world: World, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (world.folder / "events").read_text().splitlines()]
    return [one for one in lines if one["kind"] == kind]


def one_ahead(world: World) -> str:
    """Round 0 is done, and the job of round 1 is in the queue."""
    assert world.round(0) == "own-1"
    world.work_through("own-1")
    return world.waiting()


def test_the_next_round_runs_in_the_job_that_was_there_before(world: World):
    job = one_ahead(world)
    assert [one["job"] for one in told(world, "ahead")] == [job]
    assert world.round(1) == job and not world.site.ran
    world.site.begin(job)
    assert [id for id, _ in world.site.ran] == [job]
    world.work_through(job)
    assert [(one["handed"], one["nodes"], one["seconds"]) for one in told(world, "waited")] == [(True, 2, 5.0)]


def test_a_facility_says_of_no_job_that_it_waited_for_longer_than_it_can_have(world: World):
    """Node-hours are limited for all facilities together (`rounds.node_hours`)."""
    job = one_ahead(world)
    world.site.jobs[job]["state"] = "RUNNING"
    give_up(Path(world.site.jobs[job]["directory"]))
    world.site.look(job, 1e7)
    world.let(5)
    (waited,) = told(world, "waited")
    assert not waited["handed"] and WAIT <= waited["seconds"] <= WAIT + 3600


@pytest.mark.parametrize(("asked", "counted"), [(0, 2), (1, 1), (2, 2), (8, 2)])
def test_a_job_counts_with_no_more_nodes_than_it_asked_for(world: World, asked: int, counted: int):
    world.site.nodes = asked
    job = one_ahead(world)
    assert world.round(1) == job
    world.site.begin(job)
    world.work_through(job)
    assert [one["nodes"] for one in told(world, "waited")] == [counted]


def test_a_job_that_waits_is_given_its_round_and_its_wait_is_told(world: World):
    job = one_ahead(world)
    world.site.begin(job)
    assert world.round(1) == job and [id for id, _ in world.site.ran] == [job]


@pytest.mark.parametrize("then", ["again", "leave"])
def test_a_job_that_waited_in_vain_is_counted_and_replaced_where_the_user_wants(made, then):
    world = made(then=then)
    job = one_ahead(world)
    world.site.begin(job)
    world.site.finish(job)
    world.let(5)
    assert [(one["handed"], one["seconds"]) for one in told(world, "waited")] == [(False, WAIT)]
    after = world.round(1)
    assert after == ("own-2" if then == "leave" else "101") and not world.site.ran


def test_the_last_job_of_a_federation_is_followed_by_none(world: World):
    job = world.round(ROUNDS - 1)
    world.work_through(job)
    assert world.ahead.placeholder is None and not world.site.jobs


def test_a_queue_that_takes_no_second_job_costs_nothing(world: World):
    world.site.refuses = True
    world.round(0)
    world.work_through("own-1")
    assert world.round(1) == "own-2" and remembered_placeholder(world.folder / "work", "a") is None


def test_a_job_that_was_cancelled_is_not_submitted_again_in_this_run(world: World):
    world.site.cancel(one_ahead(world))
    world.let(5)
    assert world.round(1) == "own-2"
    world.work_through("own-2")
    assert world.ahead.placeholder is None


@pytest.mark.parametrize("begun", [False, True])
def test_a_killed_coordinator_gives_the_round_to_the_job_that_it_had_submitted(world: World, begun: bool):
    job = one_ahead(world)
    if begun:
        world.site.begin(job)
    world.kill()
    assert world.round(1) == job
    world.site.begin(job)
    assert len(world.site.ran) == 1


def test_a_job_whose_submission_was_never_answered_is_found_by_its_name(world: World):
    job = one_ahead(world)
    found = world.ahead.placeholder
    assert found is not None
    world.ahead._remember(type(found)(**(asdict(found) | {"job": ""})))
    world.kill()
    assert world.round(1) == job


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_job_that_has_its_round_is_given_no_other(world: World, begun: bool, known: bool):
    """`known`: the coordinator was killed between handing over and forgetting."""
    job = one_ahead(world)
    found = world.ahead.placeholder
    world.round(1)
    if begun:
        world.site.begin(job)
    if known and found is not None:
        world.ahead._remember(found)
    world.kill()
    assert world.round(1) == "own-2"
    assert world.site.jobs[job]["state"] == ("COMPLETED" if begun else "CANCELLED")
    assert len(world.site.ran) == begun


def test_with_another_template_the_job_makes_way(world: World):
    job = one_ahead(world)
    world.site.template = "two"
    world.kill()
    assert world.round(1) == "own-2" and world.site.jobs[job]["state"] == "CANCELLED"


def test_without_the_setting_the_job_of_an_earlier_run_makes_way(world: World):
    job = one_ahead(world)
    world.settings = None
    world.kill()
    assert world.round(1) == "own-2" and world.site.jobs[job]["state"] == "CANCELLED"
    world.work_through("own-2")
    assert world.ahead.placeholder is None


def test_the_end_of_a_run_leaves_no_job_in_the_queue(world: World):
    job = one_ahead(world)
    world.do(world.ahead.drop(HERE))
    assert world.site.jobs[job]["state"] == "CANCELLED" and world.ahead.placeholder is None


@pytest.mark.parametrize("lost", [["before"], ["after"], ["after", "after"], ["before", "after", "before"]])
def test_a_connection_that_breaks_while_a_round_is_handed_over_hands_it_over_once(world: World, lost: list[str]):
    job = one_ahead(world)
    world.site.begin(job)
    world.site.lost = list(lost)
    assert world.round(1) == job and len(world.site.ran) == 1


def test_what_a_job_says_of_its_wait_is_not_believed_when_it_is_impossible(world: World):
    job = one_ahead(world)
    world.round(1)
    world.site.begin(job)
    Path(world.site.jobs[job]["directory"], WAITED).write_text('{"seconds": -1e99}')
    world.work_through(job)
    assert told(world, "waited") == []


def test_a_steady_queue_is_hidden_from_the_third_round_on(made: Callable[..., World]):
    """100 s in the queue, 1000 s of training, 50 s until the next model."""
    world = made()
    starts = []
    for number in range(6):
        job = world.round(number)
        since = world.loop.now
        placed = world.site.jobs.get(job)
        if placed is None:
            world.let(100)
        elif placed["state"] == "PENDING":
            world.let(max(0.0, 100 - (since - float(placed["at"]))))
        starts.append(world.loop.now - since)

        async def others(now: float = world.loop.now) -> None:
            for _ in range(2000):
                await asyncio.sleep(1)
                for id, one in world.site.jobs.items():
                    one.setdefault("at", str(world.loop.now))
                    if one["state"] == "PENDING" and world.loop.now - float(one["at"]) >= 100:
                        world.site.begin(id)

        task = world.loop.create_task(others())
        world.work_through(job)
        world.let(49)
        task.cancel()
    assert starts[0] == 100 and starts[1] == pytest.approx(50, abs=3) and max(starts[2:]) <= 3, starts
    lost = sum(one["seconds"] for one in told(world, "waited") if one["seconds"] != 5.0)
    assert lost <= 0.05 * 5 * 1000


def test_a_facility_that_waits_for_a_slower_one_holds_no_nodes_meanwhile(made: Callable[..., World]):
    """100 s in the queue and 200 s of training, of rounds that take 2000 s: the job comes when the model does."""
    world = made()
    for number in range(6):
        job, since = world.round(number), world.loop.now
        placed = float(world.site.jobs.get(job, {}).get("at", since))
        world.let(max(0.0, placed + 100 - world.loop.now))
        world.work_through(job, 200.0)

        async def until_the_next_model(until: float = since + 2000) -> None:
            while world.loop.now < until:
                await asyncio.sleep(1)
                for id, one in world.site.jobs.items():
                    queued = world.loop.now - float(one.setdefault("at", str(world.loop.now)))
                    if one["state"] == "PENDING" and queued >= 100:
                        world.site.begin(id)
                    elif one["state"] == "RUNNING" and queued >= 100 + WAIT:
                        world.site.finish(id)

        world.do(until_the_next_model())
    assert number == 5 and job in world.site.jobs, "the jobs of later rounds were there before their models"
    in_vain = [one for one in told(world, "waited") if not one["handed"]]
    assert len(in_vain) <= 6, "of the second round alone, of whose length nothing was known"


Action = st.sampled_from(["round", "begin", "give up", "kill", "time", "lose before", "lose after", "cancel", "end"])


@given(actions=st.lists(Action, max_size=25))
@settings(max_examples=60, deadline=None)
def test_whatever_happens_a_job_runs_one_round_and_a_round_that_ended_ran_once(tmp_path_factory, actions: list[str]):
    world, number, job = World(tmp_path_factory.mktemp("w")), 0, ""
    for action in actions:
        ahead = [id for id, one in world.site.jobs.items() if one["state"] not in ENDED and id != job]
        if action == "round" and not job:
            job = world.round(number)
        elif action == "end" and job:
            world.work_through(job, 10.0)
            number, job = number + 1, ""
        elif action == "kill":
            world.kill()
            job = ""
        elif action == "time":
            world.let(50)
        elif action.startswith("lose"):
            world.site.lost.append(action.split()[1])
        elif ahead and action == "begin":
            world.site.begin(ahead[0])
        elif ahead and action == "give up":
            world.site.finish(ahead[0])
        elif ahead and action == "cancel":
            world.site.cancel(ahead[0])
    world.close()
    jobs_that_ran, rounds = [id for id, _ in world.site.ran], [command for _, command in world.site.ran]
    assert len(jobs_that_ran) == len(set(jobs_that_ran)) and len(rounds) == len(set(rounds))
    there = [id for id, one in world.site.jobs.items() if one["state"] not in ENDED and id != job]
    assert len(there) <= 1 or "kill" in actions, "one job at most is ahead"
