"""Grid engine as a real one answered (8.1.9 of Debian, one host): `recorded/gridengine-*`."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from streamflow.config.validator import SfValidator
from streamflow.core.exception import WorkflowDefinitionException
from streamflow.deployment.connector import connector_classes

from coordinator.config.deployments import Deployment
from coordinator.schedulers.gridengine import SCHEDULER
from coordinator.schedulers.registry import scheduler_named
from coordinator.schedulers.scheduler import FORGOTTEN
from coordinator.streamflow_plugin.ahead_queue import connector_for
from coordinator.streamflow_plugin.shell_queue import ShellQueue
from facility.exchange.errors import ConfigurationError
from facility.exchange.validation import parse_dataclass
from facility.launching.place import read_tasks
from tests.schedulers.recordings import recorded


def asked(line: str, answers: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell line where each program answers with a recording, whatever it is asked."""
    for program, name in answers.items():
        one = recorded(f"gridengine-{name}")
        (folder / f"{program}.out").write_text(one.out + one.err)
        file = folder / program
        file.write_text(
            f'#!/bin/sh\necho "$@" >>{folder}/{program}.asked\ncat {folder}/{program}.out\nexit {one.code}\n'
        )
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    path = f"{folder}{os.pathsep}/usr/bin:/bin"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env={"PATH": path})


def test_it_is_found_by_its_file_alone():
    assert scheduler_named("gridengine") is SCHEDULER
    assert parse_dataclass(Deployment, {"type": "gridengine", "template": "gridengine"}, where="d").type == "gridengine"
    with pytest.raises(ConfigurationError, match="gridengine"):
        parse_dataclass(Deployment, {"type": "gridengines", "template": "gridengine"}, where="d")
    assert connector_for(SCHEDULER).__mro__[1].__name__ == "AheadQueue"


def test_streamflow_accepts_it_once_the_plug_in_is_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(connector_classes, "gridengine", connector_for(SCHEDULER))
    service = {"file": "jobs/a.sh", "jobName": "crossfed-f-a"}
    deployment = {"type": "gridengine", "config": {"maxConcurrentJobs": 2, "services": {"train": service}}}
    SfValidator().validate({"version": "v1.0", "deployments": {"facility-a": deployment}})
    service["time"] = "1:00"
    with pytest.raises(WorkflowDefinitionException, match="time"):
        SfValidator().validate({"version": "v1.0", "deployments": {"facility-a": deployment}})


def test_jobs_are_found_by_their_whole_name_with_why_they_wait(tmp_path: Path):
    def named(name: str) -> list[tuple[str, str, bool, str]]:
        done = asked(SCHEDULER.listing(name), {"qstat": "qstat-r"}, tmp_path)
        assert SCHEDULER.is_answer(done.stdout, done.returncode)
        return [(job.id, job.state, job.began, job.reason) for job in SCHEDULER.read_listing(done.stdout)]

    assert named("crossfed-f-a") == [("1", "qw", False, "")]
    assert named("crossfed-f-h") == [("3", "hqw", False, "hqw")]
    assert named("crossfed-f") == [], "the table cuts names; only the whole one counts"
    (held,) = SCHEDULER.read_listing("3 hqw\n")
    assert "qrls 3" in SCHEDULER.what_to_do(held)


def test_only_those_that_have_not_begun_are_cancelled(tmp_path: Path):
    asked(SCHEDULER.cancel_waiting("crossfed-f-a"), {"qstat": "qstat-running", "qdel": "qdel-running"}, tmp_path)
    assert not (tmp_path / "qdel.asked").exists()
    asked(SCHEDULER.cancel("crossfed-f-a"), {"qstat": "qstat-running", "qdel": "qdel-running"}, tmp_path)
    assert (tmp_path / "qdel.asked").read_text() == "1\n"


def test_an_end_is_only_what_grid_engine_says_it_does_not_know():
    table, gone = recorded("gridengine-qstat-ended"), recorded("gridengine-qstat-j-ended")
    ids = ["1", "2", "5"]
    states = SCHEDULER.read_states(table.out + gone.out + gone.err, 0, ids)
    assert states == {"1": FORGOTTEN, "5": "qw"} and SCHEDULER.ended(states, ids) == ["1"], "of 2 it says nothing"
    running = SCHEDULER.read_states(recorded("gridengine-qstat-running").out, 0, ids)
    assert running == {"1": "r", "2": "r", "5": "qw"} and SCHEDULER.ended(running, ids) == []


@pytest.mark.parametrize("name", ["down-qstat", "down-qsub", "down-qdel"])
def test_a_qmaster_that_is_down_is_silence(name: str):
    down = recorded(f"gridengine-{name}")
    for text in down.texts:
        assert SCHEDULER.is_silence(text) and not SCHEDULER.is_answer(text, down.code)
        assert SCHEDULER.read_states(text, down.code, ["1"]) == {}
    assert not SCHEDULER.is_silence(recorded("gridengine-qsub-unknown-queue").err)


def test_how_a_job_ended_comes_from_accounting():
    gone = recorded("gridengine-qstat-j-ended")
    said = gone.out + gone.err
    by_itself = SCHEDULER.read_ending(said + recorded("gridengine-qacct-j-code7").out, 0, "1")
    assert by_itself is not None and by_itself.code == 7 and by_itself.problem == ""
    deleted = said.replace("1", "2") + recorded("gridengine-qacct-j-deleted").out
    ended = SCHEDULER.read_ending(deleted, 0, "2")
    assert ended is not None and ended.code is None and "137" in ended.detail and ended.step_code == 7
    limit = SCHEDULER.read_ending(said + recorded("gridengine-qacct-j-limit").out, 0, "1")
    assert limit is not None and limit.code is None and limit.step_code == 7
    assert "qmaster enforced h_rt" in limit.problem, "the time limit is told in grid engine's words"
    never = SCHEDULER.read_ending(said.replace("1", "3") + recorded("gridengine-qacct-j-never").err, 0, "3")
    assert never is not None and never.state == FORGOTTEN and "never began" in never.problem
    assert SCHEDULER.read_ending(recorded("gridengine-qstat-running").out, 0, "1") is None


def test_the_id_is_read_from_what_qsub_prints():
    assert SCHEDULER.read_id(recorded("gridengine-qsub").out) == "1"
    assert SCHEDULER.submission("a b", "/o") == "qsub -terse -cwd -N 'a b' -j y -o /o"


def test_queues_are_read_with_a_parallel_environment_of_one_host():
    names = ("qconf-sql", "qconf-spl", "qhost", "qstat-g-c", "qconf-sq", "qconf-sp")
    (one,) = SCHEDULER.read_partitions("\n".join(recorded(f"gridengine-{name}").out for name in names))
    assert (one.name, one.open, one.nodes, one.cores, one.hours, one.environment) == ("all.q", True, 1, 2, 24.0, "smp")


PES = recorded("gridengine-qconf-sp").out
SPREAD = PES.replace("smp", "mpi").replace("$pe_slots", "$round_robin")


def test_an_environment_is_not_taken_by_the_rule_of_the_one_after_it():
    queue = recorded("gridengine-qconf-sq").out
    offered = "".join("pe_list  mpi smp\n" if line.startswith("pe_list") else line for line in queue.splitlines(True))
    (one,) = SCHEDULER.read_partitions(SPREAD + PES + offered)
    assert one.environment == "smp"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("#$ -pe smp 8", ""),
        ("#$ -pe eight 8", ""),
        ("#$ -l gpu=1", ""),
        ("#$ -pe mpi 8", r"'mpi' spreads a job over hosts \(allocation_rule \$round_robin\).*one host: smp$"),
        ("#$ -pe eight 16", r"'eight' spreads a job over hosts \(allocation_rule 8\)"),
        ("#$ -pe none 8", "there is no parallel environment 'none'"),
    ],
)
def test_a_job_of_several_hosts_is_refused_by_its_parallel_environment(asked: str, reason: str):
    """Recorded `qconf -sp` of one environment; the others have other values of sge_pe(5)'s allocation_rule."""
    survey = PES + SPREAD + PES.replace("smp", "eight").replace("$pe_slots", "8")
    found = SCHEDULER.refusal(survey, f"#!/bin/bash\n{asked}\n#$ -l h_rt=1:0:0\n")
    assert bool(found) == bool(reason) and re.search(reason, found), found


def test_a_job_on_several_hosts_trains_on_none():
    """$PE_HOSTFILE as sge_pe(5) describes it: host, slots, queue instance, processors."""
    several = "node1 4 all.q@node1 UNDEFINED\nnode2 4 all.q@node2 UNDEFINED\n"
    environ = {"JOB_ID": "7", "PE_HOSTFILE": "/spool/7.1/pe_hostfile"}
    assert read_tasks(environ, several.splitlines()[0] + "\n").nodes == 1
    with pytest.raises(ConfigurationError, match=r"grid engine gave this job 2 nodes \(node1, node2.*pe_slots"):
        read_tasks(environ, several)


class AtOnce(ShellQueue):
    """A queue on this machine whose submission runs the script that it is given."""

    services: dict[str, Any] = {}
    scheduler: Any = SimpleNamespace(title="a shell", submission=lambda name, output: "sh")

    def __init__(self) -> None:
        pass

    async def run(self, *, location: Any, command: list[str], capture_output: bool) -> Any:  # type: ignore[override]
        done = subprocess.run(["sh", "-c", *command], capture_output=True, text=True)
        return done.stdout, done.returncode


def test_a_job_is_submitted_in_its_folder_with_its_variables(tmp_path: Path):
    """Whatever they hold, the shell of the login node makes nothing of it."""
    folder, value = tmp_path / "a folder", "it's $HOME; `id`"
    folder.mkdir()
    script = """printf '%s|' "$VALUE" "$PWD" 'quoted "twice"'"""
    for given in ({"VALUE": value}, {}, None):
        said = AtOnce()._run_batch_command(script, given, "job", SimpleNamespace(service=None), workdir=str(folder))
        assert asyncio.run(said) == f'{value if given else ""}|{folder}|quoted "twice"|'
