"""Node-hours through a gate: clocks that jump, gates at once, one that waits too long, a scheduler that is silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from facility.gating import jobs, queue
from facility.gating.ledger import DAY, RESERVED_SECONDS, JobEntry, Ledger, ledger_locked, read_ledger
from tests.conftest import ROOT
from tests.security import test_gate
from tests.security.test_gate import Gate

site = test_gate.site
NAME = "crossfed-heron-alpha"
YEAR = 365 * DAY


def ledger_of(site: Gate) -> Path:
    return site.home / "gate" / "ledger.json"


def at(path: Path, now: float) -> Ledger:
    with ledger_locked(path, lambda: now):
        pass
    return read_ledger(path)


def test_what_was_used_by_a_clock_that_was_ahead_counts_for_a_day_once_it_is_set_back(tmp_path: Path):
    """It counted until that later time had come: the day's share was lost for years."""
    path, now = tmp_path / "ledger.json", 1000 * DAY
    with ledger_locked(path, lambda: now + 10 * YEAR) as (book, ahead):
        book.let_out(70, ahead)
        book.let_in(80, ahead)
        book.count_command(ahead)
        ended = ahead + 1800
        book.jobs.append(JobEntry(id="1", name="n", directory="/d", submitted=ahead, hours=2.0, ended=ended))
        book.jobs.append(JobEntry(id="2", name="n", directory="/d", submitted=ahead, hours=2.0))
    for later in (0.0, 3600.0, DAY - 3600):
        book = at(path, now + later)
        assert (book.bytes_out(now + later), book.bytes_in(now + later)) == (70, 80)
        assert book.node_hours(now + later) == 2.5 and sum(book.commands.values()) == 1
    book = at(path, now + 2 * DAY)
    assert (book.bytes_out(now + 2 * DAY), book.bytes_in(now + 2 * DAY), book.node_hours(now + 2 * DAY)) == (0, 0, 0)


@pytest.mark.parametrize("jump", [-10 * YEAR, -DAY, -3600.0, -1.0])
def test_a_clock_that_is_set_back_gives_nobody_another_share(tmp_path: Path, jump: float):
    path, now = tmp_path / "ledger.json", 10_000 * DAY + 1800
    with ledger_locked(path, lambda: now) as (book, _):
        book.let_out(70, now)
        book.jobs.append(JobEntry(id="1", name="n", directory="/d", submitted=now, hours=2.0))
    with ledger_locked(path, lambda: now + jump) as (book, then):
        assert book.bytes_out(then) == 70 and book.node_hours(then) == 2.0
        book.let_out(5, then)
        assert book.bytes_out(then) == 75


def test_a_job_that_another_gate_submits_while_the_queue_is_asked_is_not_taken_for_one_that_has_ended(site: Gate):
    """Its hours would not have counted, and its model could have been exchanged: with requests enough at once."""
    site.policy(node_hours_per_day=5.0)
    assert site.ask(site.round())[0] == 0
    real = site.call

    def call(command, text=None, cwd=None):
        if command[0] == "squeue" and read_ledger(ledger_of(site)).job("99") is None:
            with ledger_locked(ledger_of(site)) as (book, now):
                book.jobs.append(JobEntry(id="99", name=NAME, directory="/d", submitted=now, hours=2.0))
            return 0, "17\n"  # as the scheduler saw it before
        return real(command, text, cwd)

    site.monkeypatch.setattr(queue, "run_program", call)
    code, _, error = site.ask(site.round())
    assert code == 77 and "node_hours_per_day is 5" in error
    site.active = "17\n99\n"
    assert [job.id for job in read_ledger(ledger_of(site)).jobs if job.id and not job.ended] == ["17", "99"]


def test_a_gate_that_waited_until_it_was_taken_for_a_killed_one_submits_nothing(
    site: Gate, monkeypatch: pytest.MonkeyPatch
):
    """Requests that hold a lock can make it wait; meanwhile its hours were given to other jobs."""
    request, real = site.round(), jobs.check_places

    def late(session, job, *rest) -> None:
        real(session, job, *rest)
        with ledger_locked(session.ledger) as (book, _):
            book.jobs[-1].submitted -= RESERVED_SECONDS + 1
        queue.note_ends(session)

    monkeypatch.setattr(jobs, "check_places", late)
    code, _, error = site.ask(request)
    assert code == 77 and "no longer reserved" in error
    assert not [command for command, _ in site.calls if command[0] == "sbatch"]


def test_a_job_that_the_scheduler_may_have_taken_counts_though_it_did_not_answer(
    site: Gate, monkeypatch: pytest.MonkeyPatch
):
    """It ran, of no entry: not counted, not found by its name, and its model not held."""
    site.policy(node_hours_per_day=2.0)
    silent = lambda command, text=None, cwd=None: (queue.UNANSWERED, "sbatch did not answer within 120 s\n")  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(queue, "run_program", silent)
        code, out, error = site.ask(site.round())
    assert (code, out) == (2, b"") and "did not answer" in error
    (job,) = read_ledger(ledger_of(site)).jobs
    assert job.unnamed(NAME)
    site.active = "18\n"
    code, _, error = site.ask(site.round())
    assert code == 77 and "2.00 were used or reserved" in error
    assert site.ask(f"crossfed-gate jobs {NAME}")[:2] == (0, b"18\n")
    assert read_ledger(ledger_of(site)).job("18") is not None


def test_a_program_that_is_silent_has_a_code_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queue, "SECONDS", 0.1)
    assert queue.run_program(["sleep", "60"])[0] == queue.UNANSWERED


def test_what_runs_on_a_host_without_a_queue_ends_in_time_though_its_gate_was_killed(tmp_path: Path):
    """`hours` bounds it, and nothing else does there."""
    program = f"""
import sys
from pathlib import Path
from types import SimpleNamespace
from facility.gating import queue
queue.SPARE_SECONDS = 0.0
session = SimpleNamespace(policy=SimpleNamespace(hours=1 / 3600, job_output=True))
script = "echo $BASHPID > begun.new; mv begun.new begun; while true; do sleep 0.1; done"
queue.on_this_host(session, script, "crossfed-test", Path({str(tmp_path)!r}))
"""
    gate = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    begun = tmp_path / "begun"
    for _ in range(300):
        if begun.exists() or gate.poll() is not None:
            break
        time.sleep(0.1)
    gate.kill()
    gate.wait()
    job = Path("/proc") / begun.read_text().strip()
    for _ in range(300):
        if not job.exists():
            return
        time.sleep(0.1)
    os.kill(int(job.name), signal.SIGKILL)
    pytest.fail("it went on without a limit")
