"""Stuck jobs, from schedulers' recorded answers and through stand-ins for their commands; and cancelling them."""

from __future__ import annotations

import logging
import shlex
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config.federation import read_federation
from coordinator.engine.progress import Progress
from coordinator.engine.queues import NoAnswer, Queue, read_queues
from coordinator.engine.render import write_rendered
from coordinator.engine.stuck_jobs import Watch, current_jobs
from coordinator.events.event import Event
from coordinator.schedulers.none import SCHEDULER as NONE
from coordinator.schedulers.registry import scheduler_named
from coordinator.schedulers.scheduler import Job, step_code
from coordinator.schedulers.slurm import SCHEDULER as SLURM
from coordinator.streamflow_plugin.ssh import tethered
from coordinator.streamflow_plugin.waiting import Waiting
from facility.exchange.errors import TransientError
from facility.exchange.job_names import MARK
from tests.engine.messages import Collected, engine_messages
from tests.federations import write_federation


@pytest.mark.parametrize(
    ("kind", "reason", "words"),
    [
        ("slurm", "JobHeldUser", "scontrol release 7"),
        ("slurm", "JobHeldAdmin", "staff"),
        ("slurm", "DependencyNeverSatisfied", "--dependency"),
        ("slurm", "PartitionDown", "partition takes no jobs"),
        ("slurm", "PartitionTimeLimit", "more than the partition allows"),
        ("slurm", "AssocGrpCPUMinutesLimit", "budget"),
        ("slurm", "AssocGrpBillingMinutes", "budget"),
        ("slurm", "QOSMaxNodePerJobLimit", "allow one job"),
        ("slurm", "ReqNodeNotAvail, UnavailableNodes:n[1-2]", "sinfo -R"),
        ("slurm", "InvalidAccount", "correct `fill:`"),
        ("pbs", "held=u ", "qrls 7"),
        ("pbs", "held=s Job held by staff", "Hold_Types"),
        ("pbs", "Can Never Run: Insufficient amount of resource: ngpus (R: 8 A: 4 T: 4)", "pbsnodes"),
        ("pbs", "Not Running: Queue not started.", "queue is closed"),
        ("flux", "urgency=0", "flux job urgency 7 default"),
    ],
)
def test_a_reason_that_no_time_clears_comes_with_what_to_do(kind: str, reason: str, words: str):
    assert words in scheduler_named(kind).what_to_do(Job(id="7", state="PENDING", began=False, reason=reason))
    assert scheduler_named(kind).what_to_do(Job(id="7", state="RUNNING", began=True, reason=reason)) == ""


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        *(
            ("slurm", r)
            for r in ("Priority", "Resources", "None", "BeginTime", "QOSMaxJobsPerUserLimit", "Dependency", "")
        ),
        ("pbs", "Not Running: Insufficient amount of resource: ncpus"),
        ("flux", "urgency=16"),
        ("ssh", ""),
    ],
)
def test_ordinary_waiting_is_left_alone(kind: str, reason: str):
    assert scheduler_named(kind).what_to_do(Job(id="7", state="PENDING", began=False, reason=reason)) == ""


class Held(Queue):
    """A queue with one held job, until it is cancelled."""

    def _ask(self, command: str) -> str:
        asked: list[str] = self.ssh["asked"]
        asked.append(command)
        return "" if self.scheduler.cancel_waiting("n") in asked else "7 PENDING JobHeldUser\n"


def test_a_stuck_job_is_told_once_and_given_up_after_the_queues_patience():
    asked: list[str] = []
    queue = Held(
        facility="site", kind="slurm", job_name="n", directory=Path("/"), ssh={"asked": asked}, patience_seconds=600
    )
    said = engine_messages()
    now = [0.0]
    watch = Watch(queues=[queue], clock=lambda: now[0])
    for now[0] in (0.0, 300.0, 599.0):
        watch.look()
    assert len(said) == 1 and "scontrol release 7" in said[0] and "10 min" in said[0]
    assert SLURM.cancel_waiting("n") not in asked
    now[0] = 600.0
    watch.look()
    watch.look()
    assert asked.count(SLURM.cancel_waiting("n")) == 1 and "goes on without it" in said[-1] and len(said) == 2


def test_without_a_limit_a_stuck_job_is_only_told():
    asked: list[str] = []
    queue = Held(facility="site", kind="slurm", job_name="n", directory=Path("/"), ssh={"asked": asked})
    now, said = [0.0], engine_messages()
    watch = Watch(queues=[queue], clock=lambda: now[0])
    for now[0] in (0.0, 1e9):
        watch.look()
    assert len(said) == 1 and SLURM.cancel_waiting("n") not in asked


def test_a_facility_that_does_not_answer_is_asked_ever_more_rarely():
    """Each look is a login, and sites lock out addresses whose logins fail often. One that answers is always asked."""
    asked: list[int] = []
    looks = [0]

    class Silent(Queue):
        def _ask(self, command: str) -> str:
            asked.append(looks[0])
            if looks[0] < 60:
                raise TransientError("far refuses the login")
            return ""

    far = Silent(facility="far", kind="slurm", job_name="n", directory=Path("/"), ssh={})
    near = Held(facility="site", kind="slurm", job_name="n", directory=Path("/"), ssh={"asked": []})
    watch = Watch(queues=[far, near])
    for looks[0] in range(70):
        watch.look()
    assert asked == [0, 2, 6, 14, 30, 46, *range(62, 70)] and len(near.ssh["asked"]) == 70


def test_a_login_node_that_does_not_answer_is_told_once_whoever_asked_it_and_so_is_its_answer():
    """It was told in the words of the look before a start, of the engine's connection and of the look of every minute.
    The engine's connection takes ten minutes to notice a link that swallows everything. A scheduler that does not
    answer, and a login that is known to be refused, are reported by the engine."""
    answers: dict[str, Exception | None] = {}

    class Far(Queue):
        def _ask(self, command: str) -> str:
            if (error := answers[self.facility]) is not None:
                raise error
            return ""

    away = NoAnswer("lumi does not answer: connection timed out")
    silent = TransientError("vega: `squeue` ended with code 1: slurm_load_jobs error")
    refused = NoAnswer("leonardo does not answer: login.leonardo refuses the login")
    answers |= {"lumi": away, "vega": silent, "leonardo": refused}
    queues = [Far(facility=name, kind="slurm", job_name="n", directory=Path("/"), ssh={}) for name in answers]
    progress, said = Progress([*answers], 2), []
    fields = {"facility": "leonardo", "host": "login.leonardo", "reason": "Permission denied"}
    progress.feed(Event(kind="login_refused", fields=fields))

    def away_to(name: str, sentence: str) -> None:
        said.append(progress.find_away(name, sentence))

    def engine(kind: str, **fields: str) -> None:
        said.append(progress.feed(Event(kind=kind, fields={"facility": "lumi", **fields})))

    watch = Watch(queues=queues, away=away_to, back=lambda name: said.append(progress.find_back(name)))
    for _ in range(8):
        watch.look()
        engine("away", reason="10.0.0.2: timed out")
    [sentence] = filter(None, said)
    assert sentence.startswith(f"{away}; ") and "go on" in sentence
    assert progress.live["lumi"].condition == "does not answer" and progress.live["vega"].condition == "waiting"
    progress.feed(Event(kind="executing", fields={"step": "/rounds/train_lumi"}))
    assert progress.live["lumi"].condition == "does not answer, training"
    answers |= dict.fromkeys(answers)
    said.clear()
    for _ in range(32):
        watch.look()
        engine("back")
    assert [one for one in said if one] == ["lumi answers again"] and progress.live["lumi"].condition == "training"


def test_the_question_of_a_login_node_that_cannot_be_reached_is_no_answer_of_its_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And the connector's own warnings are not on the console of a command, which says it all by itself."""

    async def at_once(self: Waiting, seconds: float) -> None:
        return

    monkeypatch.setattr(Waiting, "pause", at_once)
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.socket() as closed:  # bound and not listening: nobody else gets this port, and it takes no connection
        closed.bind(("127.0.0.1", 0))
        there = {"type": "slurm", "host": f"127.0.0.1:{closed.getsockname()[1]}", "user": "u", "workdir": "/w"}
        (tmp_path / "job.sh").write_text("#!/bin/bash\n{{ streamflow_command }}\n")
        facility = {"name": "lumi", "dataset": "/d", "deployment": there | {"template": str(tmp_path / "job.sh")}}
        file = write_federation(tmp_path, ["a"], facilities=[facility])
        write_rendered(read_federation(file))
        engine = Collected([])
        logging.getLogger("streamflow").addHandler(engine)
        try:
            result = CliRunner().invoke(app, ["status", "--queues", "-f", str(file)])
        finally:
            logging.getLogger("streamflow").removeHandler(engine)
        [queue] = read_queues(file.parent / "streamflow.yml")
        with pytest.raises(NoAnswer, match="lumi does not answer: 127.0.0.1"):
            queue.jobs()
    assert "lumi does not answer" in result.output and engine.messages == []


def test_status_shows_jobs_reasons_and_silent_facilities():
    class Silent(Queue):
        def _ask(self, command: str) -> str:
            raise TransientError("far does not answer: timeout")

    one = Held(facility="site", kind="slurm", job_name="n", directory=Path("/"), ssh={"asked": []})
    two = Silent(facility="far", kind="slurm", job_name="n", directory=Path("/"), ssh={})
    job, silence = current_jobs([two, one])
    assert (job["facility"], job["job"], job["reason"]) == ("site", "7", "JobHeldUser") and "scontrol release" in job[
        "do"
    ]
    assert silence["reason"] == "far does not answer: timeout"


def test_banners_and_complaints_are_no_jobs():
    text = (
        "Welcome TO the site\n\n12 PENDING ReqNodeNotAvail, Reserved for maintenance\n13 RUNNING None\n"
        "qstat: Unknown Job\n"
    )
    assert SLURM.read_listing(text) == [
        Job(id="12", state="PENDING", began=False, reason="ReqNodeNotAvail, Reserved for maintenance"),
        Job(id="13", state="RUNNING", began=True),
    ]


def test_any_other_code_of_a_job_is_sitting_out():
    assert [step_code(code) for code in (0, 7, 1, 85, 271, -9)] == [0, 7, 7, 7, 7, 7]


def test_a_job_without_queue_ends_with_its_connection_and_is_found_by_its_name(tmp_path: Path):
    """Even its grandchildren, and though nothing but its standard input tells."""
    command = f"export {MARK}='a job'; echo begun; bash -c 'sleep 300 & wait'"
    process = subprocess.Popen(["bash", "-c", tethered(command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == b"begun\n"

    def found() -> list[Job]:
        line = ["sh", "-c", NONE.listing(shlex.quote("a job"))]
        return NONE.read_listing(subprocess.run(line, capture_output=True, text=True, check=True).stdout)

    until = time.monotonic() + 200
    while not found() and time.monotonic() < until:  # the shell says "begun" before its child, which bears the name
        time.sleep(0.05)
    assert found() and all(job.began and job.state == "R" for job in found())
    process.stdin.close()  # as when the coordinator vanishes
    assert process.wait(200) == 128 + 15
    until = time.monotonic() + 200
    while found() and time.monotonic() < until:  # a killed process is there until the kernel gets to it
        time.sleep(0.05)
    assert found() == []


def test_a_jobs_own_code_and_output_come_through():
    line = ["bash", "-c", tethered("cat; echo 'it'\\''s \"here\"'; exit 7")]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read() == b'it\'s "here"\n' and process.wait(200) == 7


def test_the_end_of_a_run_waits_for_a_look_under_way(monkeypatch: pytest.MonkeyPatch):
    """Whose session at the facility would outlive the run otherwise."""
    begun, ended = threading.Event(), threading.Event()

    def look(self: Watch) -> None:
        begun.set()
        time.sleep(0.2)
        ended.set()

    monkeypatch.setattr(Watch, "look", look)
    with Watch(queues=[], every_seconds=0.01).going_on():
        assert begun.wait(10)
    assert ended.is_set()
