"""A hostile queue: what it answers is neither an option nor markup, and ends or stalls none of the others."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from coordinator.engine.queues import Queue, at_all
from coordinator.engine.stuck_jobs import current_jobs
from coordinator.schedulers.firecrest import SCHEDULER as FIRECREST
from coordinator.schedulers.registry import scheduler_named, schedulers
from coordinator.schedulers.scheduler import BatchScheduler
from coordinator.schedulers.slurm import SCHEDULER as SLURM
from tests.conftest import ROOT
from tests.engine.engines import streamflow
from tests.security.attacked import HONEST, attacked_federation, rows_of, ssh_site

FINISHED = (
    '{"Jobs": {"1.h": {"job_state": %s, "Exit_status": %s, "Output_Path": "h:/a\\u001b", "comment": "\\u202ex"}}}'
)
DEEP = 20_000
LONG = 40_000
ANSWERS = [
    "",
    '{"Jobs": 5}',
    '{"Jobs": [[1, 2]]}',
    '{"Jobs": {"1.h": 5, "--signal": {"job_state": "R"}, "; reboot": {"job_state": "R"}}}',
    '[{"id": "--signal", "state": "RUNNING", "reason": "", "code": 0, "signal": 0}]',
    "[" * DEEP + "]" * DEEP,
    '{"Jobs":' + '{"a":' * DEEP + "1" + "}" * (DEEP + 1),
    *(FINISHED % ('"F"', status) for status in ('"x"', "[1]", "1e400", "NaN", "9" * 5000, "0")),
    FINISHED % ('{"a": 1}', "0"),
    *(f"JobId=1 JobState=FAILED ExitCode={code}:0 StdOut=--help" for code in ("x", "", "9" * 5000, "٣")),
    "FAILED|" + "9" * 5000 + ":0",
    "1 PEND\x1b[2J \x1b[31mx\u202ey",
    "٣ PENDING x\n-1 PENDING x\n--signal PENDING x\n1;reboot PENDING x\n$(reboot) PENDING x",
    "1" * 100_000 + " PENDING x",
    "1 PENDING " + "[/]" * 100_000,
    "ƒabc " + "9" * 5000 + " FAILED\nƒab\u0301 COMPLETED\nf--x RUN\nf1 COMPLETED \x1b[2J",
    "do not exist:\n1\njobnumber 1\nexit_status " + "9" * 5000 + "\nfailed 0\n",
    # What a pattern could be matched with in as many ways as there are pairs of letters.
    "do not exist:" + "\n" * LONG + "x",
    "do not exist:\n1\nfailed x" + " " * LONG + "y\n",
    "f1" + " " * LONG + "y\n",
    "A" * LONG,
    "Queue: x\n" + " \n" * LONG,
    "pe_name x\n" * LONG,
    *(f"qname x\nslots 4\npe_list smp\nh_rt {digits}:00:00\n" for digits in ("9" * 400, "9" * 5000)),
]


@pytest.mark.parametrize("name", sorted(schedulers()))
def test_no_answer_of_a_queue_is_an_option_a_fault_or_a_terminal_command(name: str):
    queue, begun = scheduler_named(name), time.process_time()
    for text in ANSWERS:
        told: list[tuple[str, ...]] = [
            (job.id, job.state, job.reason, queue.what_to_do(job)) for job in queue.read_listing(text)
        ]
        if isinstance(queue, BatchScheduler):
            told += [(queue.read_id(text), queue.read_begin(text))]
            told += [(one.name, one.environment, one.describe()) for one in queue.read_partitions(text)]
            for id in ("1", "1.h", "ƒabc", "f1"):
                queue.ended(queue.read_states(text, 0, [id]), [id])
                if (ending := queue.read_ending(text, 0, id)) is not None:
                    assert ending.step_code in (0, 7) and "--help" not in ending.problem
                    told.append(("", ending.detail, ending.output, ending.problem))
        for one in told:
            assert all(part.isprintable() and len(part) < 1500 for part in one), (text[:60], one)
            assert not one[0].startswith("-") and not set(one[0]) & set("; $()") and len(one[0]) <= 100
    assert time.process_time() - begun < 100, "of this process alone: a search that goes back and forth takes hours"


def test_one_queue_whose_answers_make_no_sense_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch):
    def queue(facility: str, kind: str) -> Queue:
        return Queue(facility=facility, kind=kind, job_name="j", ssh={}, directory=Path("."))

    def read_listing(text: str) -> object:
        raise RecursionError("\x1b[2J deep")

    monkeypatch.setattr(FIRECREST, "read_listing", read_listing)
    monkeypatch.setattr(Queue, "_ask", lambda self, command: "7 PENDING Priority")
    both = [queue("odd", FIRECREST.name), queue("sound", SLURM.name)]
    found = at_all(both, lambda one: one.jobs())
    assert [job.id for job in found.jobs["sound"]] == ["7"]
    assert len(found.silent) == 1 and found.silent[0].startswith("odd: ") and found.silent[0].isprintable()
    assert {entry["facility"] for entry in current_jobs(both)} == {"sound", ""}


QUEUE = {
    "sbatch": 'case "$(cat)" in *nameless*) echo --signal;; *) echo 7;; esac',
    "squeue": 'case "$*" in *"-n "*) ;; *) echo "error: Invalid job id specified"; exit 1;; esac',
    "scontrol": 'for id; do :; done; echo "JobId=$id JobState=FAILED ExitCode=x:0"',
    "scancel": "true",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_scheduler_that_names_no_job_or_an_odd_end_is_its_facilitys_absence(tmp_path: Path):
    """Under StreamFlow: the first ended the run for all."""
    programs = tmp_path / "engine" / "bin"
    programs.mkdir(parents=True)
    for name, text in QUEUE.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        os.chmod(programs / name, 0o755)
    template = tmp_path / "job.sh"
    template.write_text("#!/bin/bash\n{{ streamflow_command }}\n")
    deployment = {"type": "slurm", "template": str(template), "workdir": str(tmp_path / "site")}
    behaviours: dict[str, dict[str, object]] = {"nameless": {}, "odd-end": {}}
    path = attacked_federation(tmp_path / "fed", behaviours, deployment=deployment, minimum_facilities=1)
    result = streamflow(path, tmp_path / "engine", timeout=500)
    assert result.returncode == 0, result.stdout[-3000:]
    rows = rows_of(path)
    assert rows[HONEST].status == "ok", rows
    assert all(rows[name].status != "ok" for name in behaviours), rows
    assert "nameless is left out of the round: sbatch" in result.stdout


OVERDUE = """
import sys
if any(word.endswith("/streamflow") for word in sys.orig_argv):
    from coordinator.streamflow_plugin import overdue
    overdue.GRACE_SECONDS = 3.0
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("state", "says"), [("RUNNING", "still runs"), ("PENDING", "still waits")])
def test_a_queue_that_says_for_ever_that_a_job_runs_or_waits_is_its_facilitys_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, says: str
):
    """Under StreamFlow, with seconds in place of half an hour: the round waited for as long as the queue said so."""
    programs, patch = tmp_path / "engine" / "bin", tmp_path / "patch"
    programs.mkdir(parents=True)
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(OVERDUE)
    monkeypatch.setenv("PYTHONPATH", f"{patch}{os.pathsep}{ROOT}")
    cancelled = tmp_path / "cancelled"
    endless = {
        "sbatch": "cat > /dev/null; echo 7",
        "squeue": f'case "$*" in *"-n "*) ;; *) echo 7 {state};; esac',
        "scancel": f'echo "$*" >> {cancelled}',
    }
    for name, text in endless.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        os.chmod(programs / name, 0o755)
    template = tmp_path / "job.sh"
    template.write_text("#!/bin/bash\n#SBATCH --time=00:00:02\n{{ streamflow_command }}\n")
    deployment = {"type": "slurm", "template": str(template), "workdir": str(tmp_path / "site")}
    rounds = {"count": 1, "longest_queue_hours": 6 / 3600}
    path = attacked_federation(
        tmp_path / "fed", {"endless": {}}, deployment=deployment, minimum_facilities=1, rounds=rounds
    )
    result = streamflow(path, tmp_path / "engine", timeout=500)
    assert result.returncode == 0, result.stdout[-3000:]
    rows = rows_of(path)
    assert rows[HONEST].status == "ok" and rows["endless"].status == "absent", rows
    assert re.search(rf"was taken for lost: Slurm says that it {says} \d+ s after", rows["endless"].reason), rows
    assert rows["endless"].reason in " ".join(result.stdout.split())
    assert cancelled.read_text().startswith("7")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_facility_where_no_directory_can_be_made_is_absent_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Under StreamFlow: a full disk, or no right to write, at one facility failed the step and with it the run."""
    with ssh_site(tmp_path) as deployment:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        path = attacked_federation(
            tmp_path / "fed", {"full": {}}, deployment=deployment | {"workdir": "/dev/null/below"}, minimum_facilities=1
        )
        result = streamflow(path, tmp_path / "engine", timeout=500)
    assert result.returncode == 0, result.stdout[-3000:]
    rows = rows_of(path)
    assert rows[HONEST].status == "ok" and rows["full"].status == "absent", rows
    assert "full is left out of the round" in result.stdout and "left no update: " in rows["full"].reason, rows
