"""A queue that reports a job as running, or as waiting, for ever: that job is taken for lost, and no other."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from streamflow.core.exception import WorkflowExecutionException

from coordinator.config.federation import read_federation
from coordinator.durations import format_duration
from coordinator.engine.render import coordinator_settings
from coordinator.report.advice import advice_for
from coordinator.rounds.late import forget_all
from coordinator.rounds.lost import read_lost
from coordinator.schedulers.firecrest import SCHEDULER as FIRECREST
from coordinator.schedulers.gated import Gated
from coordinator.schedulers.scheduler import FORGOTTEN, BatchScheduler
from coordinator.steps.expectation import Expected
from coordinator.steps.receive import receive
from coordinator.streamflow_plugin import overdue, patient, problems
from coordinator.streamflow_plugin.ahead_queue import connector_for
from coordinator.streamflow_plugin.gate import MOST_HOURS, GatedSSHConnector, GateRefused
from coordinator.streamflow_plugin.overdue import GAP_SECONDS, GONE_SECONDS, Overdue
from coordinator.streamflow_plugin.patient import PATIENCE_SECONDS
from coordinator.streamflow_plugin.this_run import RoundAtFacility, this_round
from tests.federations import write_federation
from tests.schedulers.wording import ENDED, PENDING, RUNNING, WORDINGS
from tests.security.test_gate import Gate
from tests.streamflow_plugin.virtual_time import JumpingLoop

LIMITS = {
    "slurm": "#SBATCH --time=01:00:00",
    "pbs": "#PBS -l walltime=01:00:00",
    "flux": "#flux: --time-limit=1h",
    "gridengine": "#$ -l h_rt=3600",
}
HOUR, MOST = 3600.0, 2.5 * 3600.0
"""What jobs ask for, and after how long they are taken for lost."""
PLACE: Any = SimpleNamespace(
    service="train", name="login", deployment="facility-b", wraps="login", local=False, environment={}
)


class NoCache(dict):
    """In place of one that forgets by the real clock."""

    def __contains__(self, key: object) -> bool:
        return False


class Site:
    """A login node and its queue, on a clock that jumps. Asked for several jobs at once, it says nothing."""

    def __init__(self, folder: Path, name: str, template: str) -> None:
        self.loop, self.wording = JumpingLoop(), WORDINGS[name]
        self.states: dict[str, Callable[[float], str]] = {}
        """State by job and time; '': not in the queue."""
        self.cancelled: list[str] = []
        self.at_cancel: Callable[[str], Any] = lambda id: None
        self.made = 0
        (folder / "job.sh").write_text(f"#!/bin/bash\n{template}\n{{{{ streamflow_command }}}}\n")
        login: Any = SimpleNamespace(run=self.run, deployment_name="facility-b-login")
        services = {"train": {"file": "job.sh", "jobName": "crossfed-f-b"}}
        self.queue: Any = connector_for(self.wording.scheduler)(
            "facility-b", str(folder), login, None, services=services, maxConcurrentJobs=2, pollingInterval=60
        )
        self.queue._jobs_cache = NoCache()
        self.queue._submit = self.submit

    async def submit(self, *_: Any, **__: Any) -> str:
        self.made += 1
        return self.wording.id(100 + self.made)

    async def run(self, location: Any, command: list[str], **_: Any) -> tuple[str, int]:
        line, scheduler = " ".join(command), self.wording.scheduler
        for id, state in self.states.items():
            if scheduler.cancel_ids([id]) in line:
                self.cancelled.append(id)
                if (waits := self.at_cancel(id)) is not None:
                    await waits
                return "", 0
            if scheduler.query([id]) in line:
                return self.wording.asked(id, state(self.loop.now))
        if scheduler.listing("crossfed-f-b") in line:
            there = {id: found for id, state in self.states.items() if (found := state(self.loop.now))}
            return self.wording.listed(there), 0
        return "", 0

    async def job(self, number: int = 0) -> int:
        """StreamFlow's own submitting and polling of one job; its step's code."""
        answer = await self.queue.run(
            PLACE, ["train"], workdir="/w", job_name=f"/rounds/train_b/0.{number}", stdout=asyncio.subprocess.STDOUT
        )
        return int(answer[1])

    def within(self, seconds: float, *tasks: Any) -> None:
        """So much time passes."""
        self.loop.run_until_complete(asyncio.wait(tasks, timeout=seconds) if tasks else asyncio.sleep(seconds))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(name: str = "slurm", template: str | None = None) -> Site:
        made.append(Site(tmp_path, name, LIMITS[name] if template is None else template))
        return made[-1]

    yield make
    this_round.set(None)
    for one in made:
        for task in asyncio.all_tasks(one.loop):
            task.cancel()
        one.within(1)
        one.loop.close()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    for module in (patient, overdue, problems):
        monkeypatch.setattr(module, "emit", lambda kind, **more: told.append({"kind": kind} | more))
    return told


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_a_job_that_runs_for_ever_ends_alone_is_cancelled_and_is_its_facilitys_absence(
    site: Callable[..., Site], events: list[dict[str, Any]], tmp_path: Path, name: str
):
    world = site(name)
    overdue_job, other = world.wording.id(101), world.wording.id(102)
    began = 10 * HOUR  # however long the queue was
    world.states = {
        overdue_job: lambda now: PENDING if now < began else RUNNING,
        other: lambda now: PENDING if now < began + 2 * HOUR else RUNNING,
    }
    world.queue._make_way = lambda *_: asyncio.sleep(0)
    this_round.set(RoundAtFacility(facility="b", number=3, workdir=tmp_path / "work"))
    first, second = (world.loop.create_task(world.job(number)) for number in (1, 2))
    this_round.set(None)
    world.within(began + MOST, first)
    assert not first.done() and world.cancelled == []
    world.within(300, first)
    assert first.result() == 7 and world.cancelled == [overdue_job]
    world.within(HOUR, second)
    assert not second.done() and world.cancelled == [overdue_job], "the facility's other job goes on"
    title = world.wording.scheduler.title
    said = f"job {overdue_job} of facility-b was taken for lost: {title} says that it still runs 2:3"
    text = next(one["text"] for one in events if one["kind"] == "problem" and "lost" in one["text"])
    assert text.startswith(said) and text.endswith(
        f" h after it was seen to begin, though it asked for {format_duration(HOUR)}"
    )
    ended = next(one for one in events if one["kind"] == "ended")
    assert ended["step"] == "/rounds/train_b" and "site's staff" in advice_for("left no update", ended["problem"])
    assert (reason := read_lost(tmp_path / "work" / "a-job", 3, "b")) == text
    nothing: Any = None
    row = receive(None, Expected(facility="b", round=3, model=nothing, evaluation=False, settings=nothing), lost=reason)
    assert row is not None and (row.kind, row.reason) == ("absent", text), "as the round's table has it"
    assert read_lost(tmp_path / "work" / "a-job", 4, "b") == ""
    forget_all(tmp_path / "work")
    assert read_lost(tmp_path / "work" / "a-job", 3, "b") == ""


def test_a_facility_that_does_not_answer_the_cancellation_is_absent_all_the_same(site: Callable[..., Site]):
    world = site()
    world.states = {"101": lambda now: RUNNING}
    world.queue._make_way = lambda *_: asyncio.sleep(0)
    world.at_cancel = lambda id: asyncio.sleep(1e9)
    task = world.loop.create_task(world.job())
    world.within(MOST + 300, task)
    assert task.result() == 7 and world.cancelled == ["101"]


def test_a_job_that_ends_late_but_within_bounds_has_the_end_that_its_scheduler_says(site: Callable[..., Site]):
    world = site("pbs")
    id = world.wording.id(101)
    world.states = {id: lambda now: RUNNING if now < MOST - 120 else ENDED}
    world.queue._make_way = lambda *_: asyncio.sleep(0)
    world.queue._ask = lambda *_: asyncio.sleep(0, patient.Ending(state="F", code=0))
    task = world.loop.create_task(world.job())
    world.within(MOST + HOUR, task)
    assert task.result() == 0 and world.cancelled == []


@pytest.mark.slow
@pytest.mark.parametrize("template", ["", "#SBATCH --time=UNLIMITED"])
def test_a_job_whose_limit_nothing_says_runs_as_long_as_its_queue_says(site: Callable[..., Site], template: str):
    world = site(template=template)
    world.states = {"101": lambda now: RUNNING}
    world.queue._make_way = lambda *_: asyncio.sleep(0)
    task = world.loop.create_task(world.job())
    world.within(100 * HOUR, task)
    assert not task.done() and world.cancelled == []


def test_the_limit_is_the_options_before_the_templates(site: Callable[..., Site]):
    world = site()
    assert asyncio.run(world.queue.limit_of(PLACE)) == HOUR
    world.queue.services["train"].time = "30"
    assert asyncio.run(world.queue.limit_of(PLACE)) == HOUR / 2


def behind_a_gate(world: Site, *answers: str | Exception) -> list[str]:
    """The same site behind a gate that answers `hello` so, its last answer again and again; returns what is asked."""
    asked: list[str] = []
    gate: Any = object.__new__(GatedSSHConnector)
    gate.deployment_name = "facility-b-login"

    async def ask(location: Any, request: str, timeout: float, *, attempts: int) -> tuple[str, int]:
        assert request == "crossfed-gate hello" and timeout <= 60 and attempts == 1
        asked.append(request)
        if isinstance(answer := answers[min(len(asked), len(answers)) - 1], Exception):
            raise answer
        return answer, 0

    gate.ask, gate.run = ask, world.run
    world.queue.connector = gate
    world.wording = copy.copy(world.wording)
    world.wording.scheduler = Gated(world.queue.behind)  # type: ignore[misc]
    return asked


def test_the_limit_of_a_job_behind_a_gate_is_that_of_the_sites_policy(
    site: Callable[..., Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary
):
    (tmp_path / "gate").mkdir()
    gate = Gate((tmp_path / "gate").resolve(), monkeypatch, capfdbinary)
    gate.policy(hours=1.0, ahead_seconds=600)
    code, hello, _ = gate.ask("crossfed-gate hello")
    assert code == 0
    world = site(template="#SBATCH --time=09:00:00")
    asked = behind_a_gate(world, "a banner\n" + hello.decode().strip())
    world.states = {"101": lambda now: RUNNING}
    world.queue._make_way = lambda *_: asyncio.sleep(0)
    task = world.loop.create_task(world.job())
    world.within(MOST, task)
    assert not task.done() and world.cancelled == []
    world.within(300, task)
    assert task.result() == 7 and world.cancelled == ["101"] and len(asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        *("", "no JSON", "[2.0]", "{}", "[" * 5000, '{"hours": 0}', '{"hours": -1}', '{"hours": true}'),
        *('{"hours": null}', '{"hours": "2"}', '{"hours": NaN}', '{"hours": 1e400}', '{"hours": 1e14}'),
    ],
)
def test_a_gate_that_states_no_limit_or_nonsense_has_a_bounded_one(site: Callable[..., Site], answer: str):
    world = site()
    asked = behind_a_gate(world, answer)
    for _ in range(2):
        assert world.loop.run_until_complete(world.queue.limit_of(PLACE)) == 3600 * MOST_HOURS
    assert len(asked) == 1


def test_a_gate_that_does_not_tell_its_limit_now_is_asked_again(site: Callable[..., Site]):
    world = site()
    behind_a_gate(world, WorkflowExecutionException("no answer"), GateRefused("no"), '{"hours": 3}')
    limits = [world.loop.run_until_complete(world.queue.limit_of(PLACE)) for _ in range(4)]
    assert limits == [3600 * MOST_HOURS] * 2 + [3 * HOUR] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LIMITS))
def test_a_job_that_waits_for_ever_is_its_facilitys_absence_and_the_next_round_has_a_new_one(
    site: Callable[..., Site], events: list[dict[str, Any]], tmp_path: Path, name: str
):
    world = site(name)
    waiting, other, following = (world.wording.id(number) for number in (101, 102, 103))
    world.states = {waiting: lambda now: "" if world.cancelled else PENDING, other: lambda now: RUNNING}
    make_way, world.queue._make_way = world.queue._make_way, lambda *_: asyncio.sleep(0)
    world.queue._overdue.longest_wait = 10 * HOUR
    world.queue.limit_of = lambda _: asyncio.sleep(0, 1000 * HOUR)
    this_round.set(RoundAtFacility(facility="b", number=3, workdir=tmp_path / "work"))
    first = world.loop.create_task(world.job(1))
    this_round.set(None)
    second = world.loop.create_task(world.job(2))
    world.within(10 * HOUR, first)
    assert not first.done() and world.cancelled == []
    world.within(300, first)
    assert first.result() == 7 and world.cancelled == [waiting] and not second.done()
    reason = read_lost(tmp_path / "work" / "a-job", 3, "b")
    title = world.wording.scheduler.title
    assert reason.startswith(f"job {waiting} of facility-b was taken for lost: {title} says that it still waits 10:0")
    assert reason.endswith(" after it was first seen; rounds.longest_queue_hours is 10")
    ended = next(one for one in events if one["kind"] == "ended")
    assert "longest_queue_hours" in advice_for("left no update", ended["problem"])
    world.states = {following: lambda now: ENDED}
    world.queue._make_way = make_way
    world.queue._ask = lambda _, command, read: asyncio.sleep(
        0, [] if "crossfed-f-b" in command else patient.Ending(state="F", code=0)
    )
    assert world.loop.run_until_complete(world.job(3)) == 0 and world.made == 3


def test_the_longest_wait_is_a_week_or_what_federation_yml_says_and_0_is_no_bound(
    site: Callable[..., Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    world = site()
    assert world.queue._overdue.longest_wait == 168 * HOUR
    for number, hours in enumerate((36, 0)):
        root = tmp_path / str(number)
        path = write_federation(root, ["a", "b"], rounds={"count": 2, "longest_queue_hours": hours})
        (root / "coordinator.json").write_text(json.dumps(coordinator_settings(read_federation(path))))
        monkeypatch.setattr(sys, "argv", ["streamflow", "run", str(root / "streamflow.yml")])
        assert Overdue(world.queue).longest_wait == hours * HOUR
    world.queue._overdue.longest_wait = 0
    world.states = {"101": lambda now: PENDING}
    world.queue._make_way = lambda *_: asyncio.sleep(0)
    task = world.loop.create_task(world.job())
    world.within(200 * HOUR, task)
    assert not task.done() and world.cancelled == []


def test_a_queue_that_lets_a_job_begin_again_and_again_holds_no_round_for_longer(site: Callable[..., Site]):
    """Each begin gives the job its whole limit again; what it ran before counts as waiting."""
    world = site()
    world.states = {"101": lambda now: PENDING if now % (2 * HOUR) < 120 else RUNNING}
    world.queue._make_way = lambda *_: asyncio.sleep(0)
    world.queue._overdue.longest_wait = 24 * HOUR
    task = world.loop.create_task(world.job())
    world.within(24 * HOUR, task)
    assert not task.done()
    world.within(MOST, task)
    assert task.result() == 7 and world.cancelled == ["101"]


def test_a_silence_counts_half_an_hour_of_waiting(site: Callable[..., Site]):
    world = site()
    world.states = {"101": lambda now: PENDING}
    world.queue._make_way = lambda *_: asyncio.sleep(0)
    world.queue._overdue.longest_wait = 10 * HOUR
    task = world.loop.create_task(world.job())
    world.within(HOUR, task)
    world.loop.now += 100 * HOUR
    world.within(9 * HOUR - GAP_SECONDS - 120, task)
    assert not task.done()
    world.within(600, task)
    assert task.result() == 7


def test_the_time_that_a_job_waited_before_its_model_came_counts(site: Callable[..., Site]):
    world = site()
    world.states = {"101": lambda now: PENDING}
    world.queue._overdue.longest_wait = 10 * HOUR
    for _ in range(541):  # submitted ahead, and asked about every minute
        world.loop.run_until_complete(world.queue.states_of(["101"], PLACE))
        world.within(60)
    world.queue._make_way = lambda *_: asyncio.sleep(0)
    task = world.loop.create_task(world.job())
    world.within(HOUR / 2, task)
    assert not task.done()
    world.within(HOUR, task)
    assert task.result() == 7 and world.cancelled == ["101"]


def test_a_job_of_an_earlier_run_that_is_cancelled_and_still_waits_holds_no_round(
    site: Callable[..., Site], tmp_path: Path
):
    """It was cancelled every five seconds, for as long as the queue listed it."""
    world = site()
    world.states = {"77": lambda now: PENDING}
    this_round.set(RoundAtFacility(facility="b", number=0, workdir=tmp_path / "work"))
    task = world.loop.create_task(world.queue._make_way("crossfed-f-b", PLACE))
    world.within(60, task)
    world.loop.now += 10 * HOUR  # the login is lost, and perhaps the cancellation with it
    world.within(GONE_SECONDS - 180, task)
    assert not task.done() and len(world.cancelled) > 60
    world.within(180, task)
    with pytest.raises(WorkflowExecutionException, match="says that job 77 still waits and was cancelled"):
        task.result()
    assert "no other job is submitted beside it" in read_lost(tmp_path / "work" / "a-job", 0, "b")
    again = world.loop.create_task(world.queue._make_way("crossfed-f-b", PLACE))
    world.within(60, again)
    assert again.exception() is not None, "the next round waits no ten minutes"
    world.states = {"77": lambda now: "" if world.cancelled[-1] == "last" else PENDING}
    world.at_cancel = lambda id: world.cancelled.append("last")
    last = world.loop.create_task(world.queue._make_way("crossfed-f-b", PLACE))
    world.within(60, last)
    assert last.result() is None, "one that goes in the end makes way"


@pytest.mark.parametrize("goes", [True, False], ids=["ends", "stays"])
def test_a_job_of_an_earlier_run_that_runs_for_ever_is_cancelled_and_holds_no_round(
    site: Callable[..., Site], events: list[dict[str, Any]], tmp_path: Path, goes: bool
):
    """Its begin is not known: it counts from the first look of this run."""
    world = site()
    world.states = {"77": lambda now: "" if goes and world.cancelled else RUNNING}
    this_round.set(RoundAtFacility(facility="b", number=0, workdir=tmp_path / "work"))
    task = world.loop.create_task(world.queue._make_way("crossfed-f-b", PLACE))
    world.within(MOST, task)
    assert not task.done() and world.cancelled == []
    world.within(GONE_SECONDS + 60, task)
    assert task.done() and world.cancelled == ["77"]
    assert sum("it is cancelled" in one.get("text", "") for one in events) == 1
    if goes:
        assert task.result() is None
        return
    with pytest.raises(WorkflowExecutionException, match="Slurm of facility-b says that job 77 still runs"):
        task.result()
    assert "no other job is submitted beside it" in read_lost(tmp_path / "work" / "a-job", 0, "b")
    again = world.loop.create_task(world.queue._make_way("crossfed-f-b", PLACE))
    world.within(60, again)
    assert again.exception() is not None and world.cancelled == ["77", "77"], "the next round waits no ten minutes"


def test_the_time_that_a_job_waits_for_its_model_counts(site: Callable[..., Site]):
    world = site()
    world.states = {"101": lambda now: RUNNING}
    for _ in range(121):  # submitted ahead, and asked about every minute
        world.loop.run_until_complete(world.queue.states_of(["101"], PLACE))
        world.within(60)
    world.queue._make_way = lambda *_: asyncio.sleep(0)
    task = world.loop.create_task(world.job())
    world.within(HOUR / 2 + 300, task)
    assert task.result() == 7 and world.cancelled == ["101"]


@pytest.mark.parametrize("state", [PENDING, RUNNING])
def test_a_queue_that_lists_ever_new_jobs_holds_no_round(site: Callable[..., Site], tmp_path: Path, state: str):
    world = site()
    world.wording = copy.copy(world.wording)
    world.wording.listed = lambda _: f"{1000 + int(world.loop.now)} {state} None\n"  # type: ignore[method-assign]
    this_round.set(RoundAtFacility(facility="b", number=0, workdir=tmp_path / "work"))
    task = world.loop.create_task(world.queue._make_way("crossfed-f-b", PLACE))
    world.within(HOUR, task)
    with pytest.raises(WorkflowExecutionException, match="lists ever new jobs"):
        task.result()
    assert "Slurm of facility-b lists ever new jobs" in read_lost(tmp_path / "work" / "a-job", 0, "b")


def test_a_job_that_its_queue_lists_as_ended_holds_no_round(site: Callable[..., Site]):
    world = site()
    world.wording = copy.copy(world.wording)
    world.wording.listed = lambda _: "77 COMPLETED None\n"  # type: ignore[method-assign]
    task = world.loop.create_task(world.queue._make_way("crossfed-f-b", PLACE))
    world.within(60, task)
    assert task.done() and task.result() is None


def ends(
    scheduler: BatchScheduler,
    answers: list[tuple[float, str]],
    until: float,
    asked: float | None = None,
    longest_wait: float = 168 * HOUR,
) -> bool:
    """Whether a job is overdue: each state was told every ten minutes from its time to the next one's, or `until`.

    `asked`: when the last question was put, if not when it was answered.
    """
    loop = JumpingLoop()

    async def nothing(*_: Any) -> tuple[str, int]:
        return "", 0

    queue: Any = SimpleNamespace(
        scheduler=scheduler,
        deployment_name="facility-b",
        limit_of=lambda _: asyncio.sleep(0, HOUR),
        shell_line=nothing,
    )

    async def judged() -> bool:
        times = Overdue(queue)
        times.longest_wait = longest_wait
        for (at, state), (end, _) in zip(answers, [*answers[1:], (until, "")], strict=True):
            loop.now = at
            while loop.now < end:
                times.see({"1": state}, loop.now)
                loop.now = min(loop.now + 600, end)
        loop.now = until
        times.see({"1": answers[-1][1]}, until if asked is None else asked)
        return await times.ending("1", PLACE) is not None

    try:
        return loop.run_until_complete(judged())
    finally:
        loop.close()


SEEN = [
    ("slurm", "RUNNING", "PENDING"),
    ("slurm", "RUNNING", "REQUEUED"),
    ("slurm", "COMPLETING", "SUSPENDED"),
    ("pbs", "R", "Q"),
    ("pbs", "E", "S"),
    ("flux", "RUN", "SCHED"),
    ("gridengine", "r", "Rq"),
    ("gridengine", "dr", "S"),
    ("firecrest", "RUNNING", "PENDING"),
]


@pytest.mark.parametrize(("name", "runs", "waits"), SEEN)
def test_a_job_that_was_requeued_or_suspended_begins_anew(name: str, runs: str, waits: str):
    scheduler = FIRECREST if name == "firecrest" else WORDINGS[name].scheduler
    assert ends(scheduler, [(0, runs)], MOST + 1) and not ends(scheduler, [(0, runs)], MOST)
    answers = [(0.0, runs), (MOST, waits), (MOST + 60, runs)]
    assert not ends(scheduler, answers, MOST + 60 + MOST)
    assert ends(scheduler, answers, MOST + 60 + MOST + 1)


@pytest.mark.parametrize(("name", "runs", "waits"), SEEN)
def test_a_job_that_waits_or_is_suspended_for_too_long_is_overdue(name: str, runs: str, waits: str):
    scheduler, most = FIRECREST if name == "firecrest" else WORDINGS[name].scheduler, 10 * HOUR
    assert ends(scheduler, [(0, waits)], most + 1, longest_wait=most)
    assert not ends(scheduler, [(0, waits)], most, longest_wait=most)
    assert not ends(scheduler, [(0, waits), (most - 60, runs)], most + HOUR, longest_wait=most), "it has begun"


def test_an_unknown_state_runs_and_an_ended_one_does_not():
    slurm = WORDINGS["slurm"].scheduler
    assert ends(slurm, [(0, "NOVEL")], MOST + 1)
    assert not ends(slurm, [(0, "RUNNING"), (1, FORGOTTEN)], MOST + 1)
    assert not ends(slurm, [(0, "RUNNING"), (1, "COMPLETED")], MOST + 1)


def test_an_answer_that_took_long_is_judged_by_the_time_of_its_question():
    slurm = WORDINGS["slurm"].scheduler
    assert ends(slurm, [(0, "RUNNING")], MOST + 60)
    assert not ends(slurm, [(0, "RUNNING")], MOST + 60, asked=MOST)


@pytest.mark.parametrize("away", [HOUR, 100 * HOUR])
def test_a_job_that_was_requeued_in_a_silence_has_its_whole_limit_again(site: Callable[..., Site], away: float):
    """The worst case: it had almost used its limit up when the login was lost, and began anew when it came back."""
    world = site()
    world.states = {"101": lambda now: RUNNING}
    world.queue._make_way = lambda *_: asyncio.sleep(0)
    task = world.loop.create_task(world.job())
    world.within(HOUR, task)
    world.loop.now += away  # on which the loop's own timers, and so all questions, wait
    world.within(HOUR - 120, task)
    assert not task.done() and world.cancelled == []
    world.within(600, task)
    assert task.done() and world.cancelled == ["101"]


def test_a_job_that_its_queue_says_nothing_of_ends_alone(
    site: Callable[..., Site], events: list[dict[str, Any]], tmp_path: Path
):
    """An hour of silence about one job ended whichever job's poll came first, and every later job of its facility."""
    world = site(template="")
    world.states = {"102": lambda now: RUNNING, "103": lambda now: RUNNING}
    world.queue._make_way = lambda *_: asyncio.sleep(0)
    second_round = RoundAtFacility(facility="b", number=2, workdir=tmp_path / "work")
    this_round.set(second_round)
    silent = world.loop.create_task(world.job(1))
    this_round.set(None)
    other = world.loop.create_task(world.job(2))
    world.within(PATIENCE_SECONDS - 120, silent)
    assert not silent.done()
    world.within(600, silent)
    assert silent.result() == 7 and not other.done()
    said = "job 101 of facility-b was taken for lost: Slurm has said nothing of it for 60 minutes"
    assert read_lost(tmp_path / "work" / "a-job", 2, "b") == said and said in [one.get("text") for one in events]
    next_one = world.loop.create_task(world.job(3))
    world.within(3 * HOUR, next_one)
    assert not next_one.done() and not other.done(), "what is said nothing of holds no other up, then or later"


def test_a_cancellation_that_breaks_in_any_way_holds_nobody_up(site: Callable[..., Site]):
    world = site()
    world.states = {"101": lambda now: RUNNING}
    world.queue._make_way = lambda *_: asyncio.sleep(0)

    def broken(id: str) -> Any:
        raise OSError("no such host")

    world.at_cancel = broken
    unseen: list[Any] = []
    world.loop.set_exception_handler(lambda _, context: unseen.append(context))
    task = world.loop.create_task(world.job())
    world.within(MOST + 300, task)
    assert task.result() == 7 and world.cancelled == ["101"]
    gc.collect()
    assert unseen == []
