"""A job that waits for its round, as real processes: `facility.ahead` and the shell line around it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordinator.streamflow_plugin.handing_over import waiting
from facility.exchange.messages.ahead import BEGAN, COMMAND, GIVEN_UP, WAITED, Waited, read_waited

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "ahead-1"
    folder.mkdir(mode=0o700)
    return folder


def job(
    place: Path, wait: float, environment: dict[str, str] | None = None, *, python: str = sys.executable
) -> subprocess.Popen[str]:
    """What a job template runs: the waiting line in a bash that outlives the scheduler's signals."""
    bin = place.parent / "bin"
    own = bin / "python3"  # not a link: Python would take the packages of the directory that the link is in
    if not own.exists():
        bin.mkdir()
        own.write_text(f'#!/bin/sh\nexec {python} "$@"\n')
        own.chmod(0o755)
    path = f"{bin}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "-c", f"trap : USR1 USR2 TERM\n{waiting(str(place), wait)}\n"],
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)} | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def hand_over(place: Path, command: str) -> bool:
    """As the coordinator does: a link, and the first one counts."""
    own = place / f"round.{time.monotonic_ns()}"
    own.touch(mode=0o600)
    own.write_text(command)
    try:
        os.link(own, place / COMMAND)
    except FileExistsError:
        return False
    return True


def waited(place: Path) -> Waited:
    return read_waited((place / WAITED).read_text())


def until_it_waits(process: subprocess.Popen[str]) -> None:
    """Its Python handles signals."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        for child in subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split():
            try:
                program, status = os.readlink(f"/proc/{child}/exe"), Path(f"/proc/{child}/status").read_text()
            except OSError:  # it has ended since
                continue
            if "python" not in Path(program).name:  # a child of bash that is about to become Python
                continue
            caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
            if caught & (1 << (signal.SIGUSR1 - 1)):
                return
        time.sleep(0.05)
    raise AssertionError("the job does not wait")


def test_a_round_that_is_handed_over_runs_with_its_own_code_and_directory(place: Path, tmp_path: Path):
    started = job(place, 600)
    until_it_waits(started)
    assert hand_over(place, f'cd {tmp_path} && export MARK="a b" && echo "$MARK in $PWD since ${BEGAN}"; exit 7\n')
    said, _ = started.communicate(timeout=200)
    assert started.returncode == 7 and f"a b in {tmp_path} since 1" in said
    assert waited(place).handed and 0 < waited(place).seconds < 600


def test_a_round_that_is_there_before_the_job_begins_runs_at_once(place: Path):
    hand_over(place, "echo trained\n")
    started = job(place, 0)
    said, _ = started.communicate(timeout=200)
    assert started.returncode == 0 and "trained" in said and waited(place).handed


def test_a_job_that_gets_no_round_ends_well_and_can_get_none_any_more(place: Path):
    started = job(place, 0.5)
    started.communicate(timeout=200)
    assert started.returncode == 0
    assert not waited(place).handed and waited(place).seconds >= 0.5
    assert not hand_over(place, "echo trained\n") and (place / COMMAND).read_text() == GIVEN_UP


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_the_schedulers_warning_ends_the_wait(place: Path, number: signal.Signals):
    started = job(place, 600)
    until_it_waits(started)
    os.killpg(started.pid, number)
    started.communicate(timeout=200)
    assert started.returncode == 0 and not waited(place).handed and not hand_over(place, "echo trained\n")


def test_a_job_that_is_killed_decides_nothing(place: Path):
    started = job(place, 600)
    until_it_waits(started)
    os.killpg(started.pid, signal.SIGKILL)
    started.communicate(timeout=200)
    assert not (place / COMMAND).exists() and not (place / WAITED).exists()


def test_all_tasks_of_a_job_do_the_same_and_the_first_one_tells(place: Path):
    """Four tasks on two nodes, of which one comes to the end of its wait much earlier than the others."""
    tasks = []
    for task in range(4):
        slurm = {"SLURM_JOB_ID": "5", "SLURM_PROCID": str(task), "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
        slurm |= {"SLURM_NODEID": str(task // 2), "SLURM_LOCALID": str(task % 2), "SLURM_TASKS_PER_NODE": "2(x2)"}
        slurm |= {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "4"}
        slurm |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_NUM_NODES": "2"}
        tasks.append(job(place, 0.2 if task == 3 else 600, slurm | {"SLURM_STEP_ID": "0"}))
    assert [one.wait(timeout=200) for one in tasks] == [0] * 4
    assert (place / COMMAND).read_text() == GIVEN_UP and waited(place).nodes == 2


def test_a_directory_that_others_may_write_is_not_trusted(place: Path):
    hand_over(place, "echo trained\n")
    place.chmod(0o777)
    started = job(place, 0)
    said, _ = started.communicate(timeout=200)
    assert started.returncode != 0 and "trained" not in said and "only this account" in said


def test_without_the_program_a_round_that_is_there_is_run_all_the_same(place: Path):
    """A facility whose CrossFed is of an earlier version: without a round, its job ends at once."""
    (place / "facility").mkdir()
    (place / "facility" / "__init__.py").touch()
    earlier, python = {"PYTHONPATH": str(place)}, f"{sys.executable} -S"  # without what is installed beside it
    assert job(place, 600, earlier, python=python).wait(timeout=200) != 0
    hand_over(place, "echo trained; exit 7\n")
    started = job(place, 600, earlier, python=python)
    said, _ = started.communicate(timeout=200)
    assert started.returncode == 7 and "trained" in said and not (place / WAITED).exists()
