"""What queues say of jobs that wait, by the schedulers' own words and through stand-ins for their commands; giving up."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from coordinator.config.deployments import MARK
from coordinator.engine.queues import SCHEDULERS, Job, Queue, read_jobs
from coordinator.engine.stuck_jobs import Watch, present, what_to_do
from coordinator.streamflow_plugin.patient import settled
from coordinator.streamflow_plugin.pbs_flux import is_silence, pbs_jobs, pbs_running
from coordinator.streamflow_plugin.ssh import tethered
from facility.exchange.errors import TryAgain


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
    assert words in what_to_do(kind, Job(id="7", state="PENDING", began=False, reason=reason))
    assert what_to_do(kind, Job(id="7", state="RUNNING", began=True, reason=reason)) == ""


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
    assert what_to_do(kind, Job(id="7", state="PENDING", began=False, reason=reason)) == ""


class Held(Queue):
    """A queue with one held job, until it is cancelled."""

    def _ask(self, command: str) -> str:
        asked: list[str] = self.ssh["asked"]
        asked.append(command)
        return "" if self.scheduler.cancel_waiting in asked else "7 PENDING JobHeldUser\n"


def test_a_stuck_job_is_told_once_and_given_up_after_the_queues_patience():
    asked: list[str] = []
    queue = Held(
        facility="site", kind="slurm", job_name="n", directory=Path("/"), ssh={"asked": asked}, patience_seconds=600
    )
    said: list[str] = []
    now = [0.0]
    watch = Watch(queues=[queue], say=said.append, clock=lambda: now[0])
    for now[0] in (0.0, 300.0, 599.0):
        watch.look()
    assert len(said) == 1 and "scontrol release 7" in said[0] and "10 min" in said[0]
    assert SCHEDULERS["slurm"].cancel_waiting not in asked
    now[0] = 600.0
    watch.look()
    watch.look()
    assert asked.count(SCHEDULERS["slurm"].cancel_waiting) == 1 and "goes on without it" in said[-1] and len(said) == 2


def test_without_a_limit_a_stuck_job_is_only_told():
    asked: list[str] = []
    queue = Held(facility="site", kind="slurm", job_name="n", directory=Path("/"), ssh={"asked": asked})
    now, said = [0.0], []
    watch = Watch(queues=[queue], say=said.append, clock=lambda: now[0])
    for now[0] in (0.0, 1e9):
        watch.look()
    assert len(said) == 1 and SCHEDULERS["slurm"].cancel_waiting not in asked


def test_status_shows_jobs_reasons_and_silent_facilities():
    class Silent(Queue):
        def _ask(self, command: str) -> str:
            raise TryAgain("far does not answer: timeout")

    one = Held(facility="site", kind="slurm", job_name="n", directory=Path("/"), ssh={"asked": []})
    two = Silent(facility="far", kind="slurm", job_name="n", directory=Path("/"), ssh={})
    job, silence = present([two, one])
    assert (job["facility"], job["job"], job["reason"]) == ("site", "7", "JobHeldUser") and "scontrol release" in job[
        "do"
    ]
    assert silence["reason"] == "far does not answer: timeout"


def test_banners_and_complaints_are_no_jobs():
    text = "Welcome TO the site\n\n12 PENDING ReqNodeNotAvail, Reserved for maintenance\n13 RUNNING None\nqstat: Unknown Job\n"
    assert read_jobs("slurm", text) == [
        Job(id="12", state="PENDING", began=False, reason="ReqNodeNotAvail, Reserved for maintenance"),
        Job(id="13", state="RUNNING", began=True),
    ]


PROGRAMS = {
    "qselect": 'echo "qselect $*" >> "$LOG"; case "$*" in *QHW*) printf "2.pbs\\n3.pbs\\n" ;; *) printf "1.pbs\\n2.pbs\\n3.pbs\\n4.pbs\\n" ;; esac',
    "qstat": """case "$2" in
1.pbs) printf 'Job Id: 1.pbs\\n    Job_Name = n\\n    job_state = R\\n    comment = Job run at Mon\\n' ;;
2.pbs) printf 'Job Id: 2.pbs\\n    job_state = H\\n    Hold_Types = u\\n' ;;
3.pbs) printf 'Job Id: 3.pbs\\n    job_state = Q\\n    Hold_Types = n\\n    comment = Can Never Run: Insufficient amount of\\n\\tresource: ngpus\\n' ;;
*) echo "qstat: Unknown Job Id 4.pbs" >&2; exit 153 ;; esac""",
    "qdel": 'echo "qdel $*" >> "$LOG"',
    "flux": 'echo "flux $*" >> "$LOG"; [ "$1" = cancel ] || case "$*" in *urgency*) printf "f1 RUN urgency=16 \\nf2 SCHED urgency=0 \\n" ;; '
    '*pending,running*) printf "f1\\nf2\\n" ;; *) echo f2 ;; esac',
}


@pytest.fixture
def shell(tmp_path: Path):
    """Runs a scheduler's command as the login shell would, with stand-ins on the PATH; gives its output."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"

    def run(command: str) -> str:
        log.write_text("")
        line = ["sh", "-c", command.replace("NAME", "'n'")]
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log)}
        return subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout

    run.log = log  # type: ignore[attr-defined]
    return run


def test_pbs_jobs_are_listed_with_their_reasons_and_cancelled(shell):
    jobs = read_jobs("pbs", shell(SCHEDULERS["pbs"].listing))
    assert [(job.id, job.state, job.began) for job in jobs] == [
        ("1.pbs", "R", True),
        ("2.pbs", "H", False),
        ("3.pbs", "Q", False),
    ]
    assert jobs[1].reason == "held=u" and jobs[2].reason == "Can Never Run: Insufficient amount of"
    assert "qrls 2.pbs" in what_to_do("pbs", jobs[1]) and "pbsnodes" in what_to_do("pbs", jobs[2])
    shell(SCHEDULERS["pbs"].cancel_waiting)
    assert shell.log.read_text().splitlines()[-1] == "qdel 2.pbs 3.pbs" and "-N n" in shell.log.read_text()


def test_flux_jobs_are_listed_with_their_reasons_and_cancelled(shell):
    jobs = read_jobs("flux", shell(SCHEDULERS["flux"].listing))
    assert [(job.id, job.began, job.reason) for job in jobs] == [("f1", True, ""), ("f2", False, "urgency=0")]
    assert "flux job urgency f2 default" in what_to_do("flux", jobs[1])
    shell(SCHEDULERS["flux"].cancel_waiting)
    assert shell.log.read_text().splitlines()[-1] == "flux cancel f2" and "--name=n" in shell.log.read_text()


def test_odd_answers_of_qstat_are_read_as_what_they_are():
    answer = json.dumps({"Jobs": {"1.pbs": {"job_state": "R"}, "2.pbs": {"job_state": "F", "Exit_status": 271}}})
    noisy = f"qstat: Unknown Job Id 3.pbs\n{answer}\n"
    assert pbs_running(noisy, ["1.pbs", "2.pbs", "3.pbs"]) == ["1.pbs"], "a job that is not known any more has ended"
    assert pbs_running("qstat: Unknown Job Id 1.pbs\n", ["1.pbs"]) == []
    assert pbs_running("Connection refused\nqstat: cannot connect to server pbs (errno=111)", ["1.pbs"]) is None
    assert pbs_jobs("") is None and pbs_jobs("[1]") is None
    assert is_silence("qstat: cannot connect to server pbs (errno=111)") and not is_silence(
        "qstat: Unknown Job Id 1.pbs"
    )


def test_any_other_code_of_a_job_is_sitting_out():
    assert [settled(code) for code in (0, 7, 1, 85, 271, -9)] == [0, 7, 7, 7, 7, 7]


def test_a_job_without_queue_ends_with_its_connection_and_is_found_by_its_name(tmp_path: Path):
    """Even its grandchildren, and though nothing but its standard input tells."""
    command = f"export {MARK}='a job'; echo begun; bash -c 'sleep 300 & wait'"
    process = subprocess.Popen(["bash", "-c", tethered(command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == b"begun\n"
    ssh = SCHEDULERS["ssh"]

    def found() -> list[Job]:
        line = ["sh", "-c", ssh.listing.replace("NAME", shlex.quote("a job"))]
        return read_jobs("ssh", subprocess.run(line, capture_output=True, text=True, check=True).stdout)

    assert found() and all(job.began and job.state == "R" for job in found())
    process.stdin.close()  # as when the coordinator vanishes
    assert process.wait(10) == 128 + 15
    assert found() == []


def test_a_jobs_own_code_and_output_come_through():
    line = ["bash", "-c", tethered("cat; echo 'it'\\''s \"here\"'; exit 7")]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read() == b'it\'s "here"\n' and process.wait(10) == 7
