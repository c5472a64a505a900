"""An open shell that ends or fails: the next command finds a login shell again, and a submission is given once."""

from __future__ import annotations

import asyncio
import base64
import os
from types import SimpleNamespace
from typing import Any

import pytest
from streamflow.core.exception import WorkflowExecutionException
from streamflow.deployment.shell import BaseShell

from coordinator.engine.queues import Queue
from coordinator.schedulers.scheduler import ANSWER_BYTES
from coordinator.streamflow_plugin import bounded_reader
from coordinator.streamflow_plugin.ahead_queue import connector_for
from coordinator.streamflow_plugin.bounded_reader import BoundedReader
from coordinator.streamflow_plugin.patient import ConnectionBroke, may_be_repeated
from coordinator.streamflow_plugin.patient_login import PatientLogin
from coordinator.streamflow_plugin.ssh import ParallelSSHConnector
from facility.exchange.errors import TransientError
from facility.exchange.exit_codes import BROKE
from tests.streamflow_plugin.test_lost_answers import HERE, Slurm


class Stream:
    """A shell's input and output: `said` answers a command, None: its end; `closing`: it has ended before."""

    def __init__(self, said: str | None, closing: bool) -> None:
        self.said, self.stream, self.marker = said, SimpleNamespace(is_closing=lambda: closing), ""
        self.given: list[str] = []

    async def write(self, data: bytes) -> None:
        self.given.append(data.decode())
        self.marker = self.given[-1].rpartition('echo "')[2].partition(":")[0]

    async def read(self, size: int) -> bytes:
        return b"" if self.said is None else f"{self.said}\n{self.marker}:0\n".encode()

    async def close(self) -> None:
        pass


class OneShell(BaseShell):
    def __init__(self, said: str | None, *, closing: bool = False) -> None:
        super().__init__(command=["sh"], buffer_size=64)
        self.stream = Stream(said, closing)
        self._reader = BoundedReader(self.stream)
        self._writer = BoundedReader.reset_by(self.stream, self._reader)

    async def _close(self) -> None:
        pass


def given(*shells: OneShell, repeat: bool = True) -> tuple[Any, list[str]]:
    """What `sbatch` answers where these shells are opened one after the other, then none; and what sessions of their
    own were asked."""
    left, asked = list(shells), []

    async def act() -> Any:
        one = object.__new__(ParallelSSHConnector)
        one._login = PatientLogin(facility="a", files=[])
        one.deployment_name, one._shells, one._closing = "facility_a", {"login": {}}, set()  # type: ignore[assignment]
        one._shells_lock = asyncio.Lock()

        async def create(*_: Any) -> OneShell:
            return left.pop(0)

        async def end_of(_: Any, text: str, *rest: Any, **_more: Any) -> tuple[str, int]:
            asked.append(text)
            return "41", 0

        one._create_shell, one.end_of = create, end_of  # type: ignore[method-assign,assignment]
        may_be_repeated.set(repeat)
        return await one._command(HERE, ["sbatch"], None, None, None, True, 5)  # type: ignore[arg-type]

    return asyncio.run(act()), asked


def test_a_shell_that_ended_while_nothing_was_asked_is_opened_again():
    """Login nodes end what idles. Without a login shell's PATH no scheduler would be found, and the job not taken."""
    ended, anew = OneShell("", closing=True), OneShell("41")
    assert given(ended, anew, repeat=False) == (("41", 0), [])
    assert ended.stream.given == [] and len(anew.stream.given) == 1


def test_a_submission_whose_shell_ends_before_it_answers_is_given_once():
    ends, other = OneShell(None), OneShell("42")
    with pytest.raises(ConnectionBroke):
        given(ends, other, repeat=False)
    assert len(ends.stream.given) == 1 and other.stream.given == []


def test_a_question_is_asked_in_a_new_shell_and_without_one_in_a_login_shell_of_its_own():
    assert given(OneShell(None), OneShell("41")) == (("41", 0), [])
    answer, (line,) = given(OneShell(None))
    packed = line.partition("echo ")[2].split()[0]
    assert answer == ("41", 0) and "bash -lc" in line and "sbatch" in base64.b64decode(packed).decode()


def test_a_shell_that_answers_too_much_or_too_slowly_gets_no_further_command(monkeypatch: pytest.MonkeyPatch):
    """What it still prints would be taken for the answer to the next."""
    with pytest.raises(bounded_reader.AnswerTooLong):
        given(OneShell("x" * (ANSWER_BYTES + 1)), OneShell("41"))
    monkeypatch.setattr(bounded_reader, "ANSWER_SECONDS", -1.0)
    with pytest.raises(WorkflowExecutionException, match="did not end its answer"):
        given(OneShell("x"), OneShell("41"))


@pytest.mark.parametrize("long", ["x" * (ANSWER_BYTES + 1), None], ids=["here", "there"])
def test_an_answer_too_long_to_be_a_schedulers_is_silence(long: str | None):
    """Reading 64 MiB of one took minutes, in which nothing else of the run went on, and gigabytes."""

    async def run(**_: Any) -> tuple[str, int]:
        if long is None:
            raise bounded_reader.AnswerTooLong("a command answered more than 9 bytes")
        return long, 0

    made = object.__new__(connector_for(Slurm()))
    made.__dict__ |= {"_held_up": 0.0, "run": run, "deployment_name": "a", "connector": SimpleNamespace()}
    said, code = asyncio.run(made._shell(HERE, "squeue"))  # type: ignore[arg-type]
    assert code == BROKE and "more than" in said
    assert asyncio.run(made._states(["7"], HERE)) == {}  # type: ignore[arg-type]


def test_a_queue_on_this_machine_that_prints_too_much_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr("coordinator.engine.queues._here", lambda line: ("1 R\n" * (ANSWER_BYTES // 3), 0))
    queue = Queue(facility="a", kind="slurm", job_name="cf", ssh={}, directory=tmp_path)
    with pytest.raises(TransientError, match=f"more than {ANSWER_BYTES} bytes"):
        queue.jobs()


def test_a_queue_on_this_machine_that_hangs_is_told_with_the_schedulers_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path
):
    """The error was that of `subprocess`, with the whole shell line around it."""
    (tmp_path / "squeue").write_text("#!/bin/sh\nexec sleep 5\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("coordinator.engine.queues.ANSWER_SECONDS", 0.2)
    queue = Queue(facility="a", kind="slurm", job_name="cf", ssh={}, directory=tmp_path)
    with pytest.raises(
        TransientError, match="^a does not answer: `squeue [^`]*` did not end within 0.2 s; try it by hand"
    ) as e:
        queue.jobs()
    assert "sh" not in str(e.value).split() and "2>&1" not in str(e.value)
