"""A connection that ends while an answer is awaited: questions are asked again, a submission is never given twice."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncssh
import pytest
from streamflow.core.exception import WorkflowExecutionException
from streamflow.deployment.shell import BaseShell

from coordinator.report.advice import advice_for
from coordinator.rounds.lost import read_lost
from coordinator.schedulers.scheduler import Ending
from coordinator.schedulers.slurm import Slurm
from coordinator.streamflow_plugin import patient, problems
from coordinator.streamflow_plugin.ahead_queue import connector_for
from coordinator.streamflow_plugin.bounded_reader import BoundedReader
from coordinator.streamflow_plugin.gate import GatedSSHConnector
from coordinator.streamflow_plugin.lanes import TransferFailed, _ended
from coordinator.streamflow_plugin.patient import ConnectionBroke, may_be_repeated
from coordinator.streamflow_plugin.patient_login import PatientLogin
from coordinator.streamflow_plugin.ssh import ParallelSSHConnector
from coordinator.streamflow_plugin.this_run import RoundAtFacility, this_round
from facility.exchange.exit_codes import BROKE

HERE = SimpleNamespace(name="login", deployment="facility_a", service=None)


class Lost:
    """A stream of a connection that is lost while it is read."""

    async def read(self, size: int) -> bytes:
        raise asyncssh.ConnectionLost("Connection lost")

    async def write(self, data: bytes) -> None:
        pass

    async def close(self) -> None:
        pass


class LosingShell(BaseShell):
    """An open shell at a login node whose connection is lost after the command was sent."""

    def __init__(self) -> None:
        super().__init__(command=["sh"], buffer_size=64)
        self._reader, self._writer = BoundedReader(Lost()), Lost()

    async def _close(self) -> None:
        pass


def connector(answers: list[int | None]) -> Any:
    """A login node whose shells are lost; sessions of their own end with these codes, None: lost as well."""
    shells: list[LosingShell] = []

    async def get_shell(**_: Any) -> LosingShell:
        shells.append(LosingShell())
        return shells[-1]

    async def end_of(*_: Any, **_more: Any) -> tuple[str, int | None]:
        return "said", answers.pop(0)

    return SimpleNamespace(
        _login=PatientLogin(facility="facility_a", files=[]),
        deployment_name="facility_a",
        get_shell=get_shell,
        end_of=end_of,
        _get_command=lambda *_: "squeue",
        shells=shells,
        _drop=lambda *_: None,
    )


def given(login: Any, stdin: Any = None) -> Any:
    return asyncio.run(ParallelSSHConnector._command(login, HERE, ["squeue"], None, None, stdin, True, 5))  # type: ignore[arg-type]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_question_is_asked_again_and_the_lost_shell_is_closed(lost: int):
    login = connector([None] * lost + [0])
    assert given(login) == ("said", 0) and all(shell._closed for shell in login.shells)


def test_a_login_that_loses_every_answer_is_told_as_such():
    with pytest.raises(ConnectionBroke, match="facility_a broke"):
        given(connector([None] * 3))


def test_what_may_not_be_repeated_is_given_once():
    login = connector([0])
    token = may_be_repeated.set(False)
    try:
        with pytest.raises(ConnectionBroke):
            given(login)
    finally:
        may_be_repeated.reset(token)


def test_a_timeout_names_the_command_that_a_person_knows():
    """It named the line that was sent, whose script is packed, or no command at all."""

    class Hangs:
        async def read(self, *_: Any) -> bytes:
            await asyncio.sleep(60)
            raise AssertionError("nobody waits for it")

    @asynccontextmanager
    async def session(**_: Any):
        yield SimpleNamespace(stdout=Hangs(), stderr=None)

    login = SimpleNamespace(_get_ssh_client_process=session, deployment_name="facility_a")

    async def end_of(*words: Any, **more: Any) -> Any:
        return await ParallelSSHConnector.end_of(login, *words[:3], 0, **more)  # type: ignore[arg-type]

    async def timed_out(**_: Any) -> None:
        raise WorkflowExecutionException("Command timeout after 5s") from TimeoutError()

    shell = SimpleNamespace(execute=timed_out)

    async def get_shell(**_: Any) -> Any:
        return shell

    for stdin, opened in (("here", connector([])), (None, connector([]))):
        opened.end_of, opened.get_shell = end_of, get_shell
        with pytest.raises(WorkflowExecutionException, match="a does not answer: `squeue` did not end within . s; try"):
            given(opened, stdin)


def test_a_session_that_is_lost_has_no_code():
    class Process:
        stdout = Lost()
        stderr = Lost()

    @asynccontextmanager
    async def session(**_: Any):
        yield Process()

    login = SimpleNamespace(_get_ssh_client_process=session, deployment_name="facility_a")
    assert asyncio.run(ParallelSSHConnector.end_of(login, HERE, "date", 9, 5)) == ("", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "error"),
    [*((code, ConnectionResetError) for code in (-1, 129, 137, 143, None)), (1, TransferFailed), (127, TransferFailed)],
)
def test_a_transfer_whose_command_a_signal_ended_is_one_whose_connection_broke(
    status: int | None, error: type[Exception]
):
    """-1: asyncssh's for a signal. It was taken for the command's own refusal, and the round lost its facility."""

    async def wait() -> Any:
        return SimpleNamespace(exit_status=status, stderr=b"")

    process = SimpleNamespace(stdout=None, stderr=None, wait=wait)
    with pytest.raises(error):
        asyncio.run(_ended(process, "crossfed-gate get-tree"))


def queue(run: Any, **more: Any) -> Any:
    """A connector of Slurm with this way to the login node, never deployed."""
    made = object.__new__(connector_for(Slurm()))
    made.__dict__ |= {"_held_up": 0.0, "run": run, "deployment_name": "facility_a"} | more
    return made


def test_a_lost_answer_about_jobs_is_silence_and_no_end():
    async def run(**_: Any) -> Any:
        raise ConnectionBroke("the connection to facility_a broke during `squeue`")

    made = queue(run, connector=SimpleNamespace())
    assert asyncio.run(made._shell(HERE, "squeue"))[1] == BROKE
    states = asyncio.run(made._states(["7"], HERE))
    assert states == {} and Slurm().ended(states, ["7"]) == []


@pytest.mark.parametrize("killed", ["", "Killed", "bash: line 1:  4242 Killed                  sbatch", "Terminated"])
def test_a_submission_whose_answer_was_lost_is_looked_for_and_not_given_twice(monkeypatch, killed: str):
    """Its connection broke, or a signal ended sbatch (a login node was out of memory): the job may be in the queue."""
    listed, submitted = [[], [SimpleNamespace(id="41")]], []

    async def submit(*_: Any, **__: Any) -> str:
        submitted.append(1)
        if killed:
            raise WorkflowExecutionException(f"Error submitting job /rounds/train_a/0 to Slurm: {killed}")
        raise ConnectionBroke("the connection to facility_a broke during a command")

    async def jobs_named(*_: Any) -> Any:
        return listed.pop(0)

    more = {"_submit": submit, "_jobs_named": jobs_named, "_name": lambda _: "cf-a", "pollingInterval": 0}
    more |= {"_outputs": {}, "_steps": {}, "_watch": lambda *_: None, "connector": SimpleNamespace()}
    monkeypatch.setattr(patient, "report_problem", lambda *_: None)
    made = queue(None, **more)
    assert asyncio.run(made._run_batch_command("job", None, "/rounds/train_a/0", HERE)) == "41"
    assert submitted == [1]


def gate(codes: list[int]) -> Any:
    """A gate whose requests end with these codes."""
    made = object.__new__(GatedSSHConnector)

    async def end_of(*_: Any) -> tuple[str, int]:
        return "said", codes.pop(0)

    made.__dict__ |= {"end_of": end_of, "deployment_name": "facility_a"}
    return made


@pytest.mark.parametrize("code", [-9, 137])
def test_a_gate_that_is_killed_as_it_submits_may_have_submitted(code: int):
    """The round went on without the facility, whose job ran for nobody."""
    codes = [code, 0]
    with pytest.raises(ConnectionBroke, match=f"the gate of facility_a was killed .code {code}. during"):
        asyncio.run(gate(codes).submit_job(HERE, "crossfed-gate submit"))
    assert codes == [0], "it was asked once"


@pytest.mark.parametrize("code", [-9, 137])
def test_a_gate_that_is_killed_over_a_question_is_asked_again(code: int):
    """The memory of a login node was full for a moment, and the round went on without the facility."""
    assert asyncio.run(gate([code, code, 1]).ask(HERE, "crossfed-gate jobs crossfed-f-a")) == ("said", 1)
    with pytest.raises(ConnectionBroke):
        asyncio.run(gate([code] * 3).ask(HERE, "crossfed-gate jobs crossfed-f-a"))


def test_a_job_that_is_not_taken_is_an_ended_one_told_in_the_schedulers_words(monkeypatch):
    """The round goes on without its facility, as with a job that failed; an exception would end the engine."""
    events: list[dict[str, Any]] = []
    for module in (patient, problems):
        monkeypatch.setattr(module, "emit", lambda kind, **more: events.append({"kind": kind} | more))
    asked: list[str] = []

    async def submit(*_: Any, **__: Any) -> str:
        raise WorkflowExecutionException(
            "Error submitting job /rounds/train_a/0 to Slurm: sbatch: error: invalid account\nExiting."
        )

    async def run(**more: Any) -> Any:
        asked.append(str(more))

    more = {"_endings": {}, "_outputs": {}, "_errors": {}, "_steps": {}, "_watches": {}, "_scheduled_jobs": []}
    made = queue(run, _submit=submit, _name=lambda _: "", connector=SimpleNamespace(), **more)
    job_id = asyncio.run(made._run_batch_command("job", None, "/rounds/train_a/0", HERE))
    made._scheduled_jobs.append(job_id)
    assert asyncio.run(made._get_running_jobs(HERE)) == [] and asyncio.run(made._get_output(job_id, HERE)) == ""
    assert asyncio.run(made._get_returncode(job_id, HERE)) == 7 and asked == [], "no queue is asked for it"
    ended = next(one for one in events if one["kind"] == "ended")
    assert ended["step"] == "/rounds/train_a"
    assert ended["problem"] == "was not taken: Slurm: sbatch: error: invalid account Exiting."
    told = next(one["text"] for one in events if one["kind"] == "problem")
    assert told == "the job of facility_a was not taken: Slurm: sbatch: error: invalid account Exiting."
    assert "refused the job" in advice_for("left no update", ended["problem"])
    assert not any(one["kind"] == "submitted" for one in events)


def test_the_round_is_told_how_a_job_ended_that_left_nothing(tmp_path: Path):
    """Its row named four other causes, and the console alone the scheduler's words."""
    ending = Ending(state="FAILED", code=3, detail="FAILED, exit code 3", output="/work/f-a-5.log")
    made = queue(None, _endings={"5": ending}, _errors={"5": "no such module"}, _steps={}, _watches={})

    async def act() -> int:
        this_round.set(RoundAtFacility(facility="a", number=2, workdir=tmp_path))
        return await made._get_returncode("5", HERE)

    assert asyncio.run(act()) == 7
    said = read_lost(tmp_path / "a-step", 2, "a")
    how = "did not end well: FAILED, exit code 3; its output is /work/f-a-5.log"
    assert said == f"left no update: job 5 of facility_a {how}: no such module"
    assert advice_for(said) == advice_for("left no update", how) != advice_for("left no update")
