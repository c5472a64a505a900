"""A forked step is to its caller what a process of its own is; only what needs no shell is forked."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from coordinator.engine.supervise import children
from coordinator.streamflow_plugin.forked_steps import (
    OF_COORDINATOR,
    OF_FACILITY,
    ForkedSteps,
    Step,
    is_this_python,
    step_of_command,
)
from coordinator.streamflow_plugin.names import SEPARATE_STEPS
from tests.conftest import ROOT

PROBE = """
import atexit, os, sys, threading
if __name__ != "__main__":
    raise SystemExit(99)
print(*sys.argv[1:], os.getcwd(), os.environ.get("SEEN"), os.environ.get("SECRET"), __name__, sep="|")
print("told", file=sys.stderr)
atexit.register(print, "at the end")
threading.Timer(0.1, print, ["of a thread"]).start()
if sys.argv[1] == "raise":
    raise ValueError("as it should")
if sys.argv[1] == "kill":
    os.kill(os.getpid(), 9)
sys.exit({"text": "a sentence", "none": None}.get(sys.argv[1], 7))
"""


@pytest.fixture()
def probe(tmp_path: Path, monkeypatch) -> Iterator[str]:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a_step.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'package'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("SECRET", "hidden")
    yield "a_step"


def environment() -> dict[str, str]:
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "SEEN": "yes"}


@pytest.mark.parametrize("word", ["code", "raise", "text", "none", "kill"])
def test_it_says_and_ends_as_a_process_of_its_own(word: str, probe: str, tmp_path: Path):
    step = Step(module=probe, arguments=[word, "two words"], directory=str(tmp_path), environment=environment())
    steps = ForkedSteps(hidden=("SECRET",))

    async def act() -> tuple[str, int] | None:
        try:
            return await steps.run(step)
        finally:
            steps.close()

    alone = subprocess.run(
        [sys.executable, "-m", probe, word, "two words"],
        cwd=tmp_path,
        env={key: value for key, value in environment().items() if key != "SECRET"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    forked = asyncio.run(act())
    assert forked is not None
    said, code = forked
    assert code == (alone.returncode if alone.returncode >= 0 else 128 - alone.returncode)
    # which of two streams comes first depends on how Python buffers, and a traceback has the loader's own frames
    told = [line for line in alone.stdout.splitlines() if not line.startswith(("  ", "Traceback"))]
    assert sorted(told) == sorted(line for line in said.splitlines() if not line.startswith(("  ", "Traceback")))


def test_a_link_to_the_environment_is_the_environment(tmp_path: Path):
    """A federation's costs rise tenfold where steps are started anew, and nobody is told why."""
    linked = tmp_path / "link"
    linked.symlink_to(Path(sys.executable).parent.parent)
    other = tmp_path / "other" / "python3"
    other.parent.mkdir()
    other.symlink_to(sys.executable)
    assert is_this_python(str(linked / "bin"))
    assert not is_this_python(str(other.parent))  # of no environment: it finds other packages


def test_many_at_once_are_kept_apart_and_the_server_does_not_count_as_a_job(probe: str, tmp_path: Path):
    steps, before = ForkedSteps(), set(children(os.getpid()))

    async def one(number: int) -> tuple[str, int] | None:
        step = Step(module=probe, arguments=[str(number)], directory=str(tmp_path), environment=environment())
        return await steps.run(step)

    async def act() -> list[tuple[str, int] | None]:
        try:
            return await asyncio.gather(*(one(number) for number in range(60)))
        finally:
            assert set(children(os.getpid())) <= before
            steps.close()

    answers = asyncio.run(act())
    assert [answer is not None and answer[1] for answer in answers] == [7] * 60
    assert [answer is not None and int(answer[0].partition("|")[0].split()[-1]) for answer in answers] == [*range(60)]


def test_steps_outlive_the_engine_and_a_lost_server_fails_what_it_ran(tmp_path: Path, monkeypatch):
    (tmp_path / "slow_step.py").write_text(
        "import sys, time\n"
        "if __name__ == '__main__':\n"
        "    open('began', 'w')\n    time.sleep(float(sys.argv[1]))\n    open('done', 'w')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    steps = ForkedSteps()
    step = Step(module="slow_step", arguments=["1"], directory=str(tmp_path), environment=environment())

    async def act() -> tuple[str, int] | None:
        running = asyncio.ensure_future(steps.run(step))
        while not (tmp_path / "began").exists():
            await asyncio.sleep(0.02)
        assert steps._process is not None
        os.kill(steps._process.pid, signal.SIGKILL)
        answer = await running
        assert await steps.run(step) is None  # from here on every step is a process of its own
        return answer

    answer = asyncio.run(act())
    assert answer is not None and answer[1] == 1
    until = time.monotonic() + 200
    while not (tmp_path / "done").exists():
        assert time.monotonic() < until
        time.sleep(0.05)


MODULES = frozenset({"a.step"})


@pytest.mark.parametrize(
    ("command", "own", "forked"),
    [
        (["python3", "-m", "a.step", "--out", "'two words'"], {"HOME": "/x"}, True),
        (["python3", "-m", "another.step"], {}, False),
        (["python3", "-m"], {}, False),
        (["python3", "a.step"], {}, False),
        (["python3", "-m", "a.step", "$HOME"], {}, False),
        (["python3", "-m", "a.step", "&&", "true"], {}, False),
        (["python3", "-m", "a.step", "'unclosed"], {}, False),
        (["unset", "X", "&&", "python3", "-m", "a.step"], {}, False),
        (["python3", "-m", "a.step", "--out", "'two words'"], {"HOME": "/x/$USER"}, True),
        (["python3", "-m", "a.step"], {"PATH": "/nowhere"}, False),
        (["python3", "-m", "a.step"], {SEPARATE_STEPS: "1"}, False),
    ],
)
def test_only_plain_commands_of_this_python_are_forked(command: list[str], own: dict[str, str], forked: bool):
    step = step_of_command(command, modules=MODULES, directory="/x", environment=environment(), own=own)
    assert (step is not None) == forked
    if step is not None:
        assert (step.module, step.arguments) == ("a.step", ["--out", "two words"])
        assert step.environment["HOME"] == own["HOME"]


def test_without_a_directory_nothing_is_forked():
    command = ["python3", "-m", "a.step"]
    assert step_of_command(command, modules=MODULES, directory=None, environment=environment(), own={}) is None


def test_every_step_of_the_workflow_can_be_forked_but_the_one_that_starts_an_evaluation_by_tasks():
    commands = [yaml.safe_load(tool.read_text())["baseCommand"] for tool in (ROOT / "cwl" / "tools").glob("*.cwl")]
    assert {tuple(command[:2]) for command in commands} == {("python3", "-m")}
    assert {command[2] for command in commands} - {"coordinator.steps.evaluate"} == OF_COORDINATOR | OF_FACILITY
