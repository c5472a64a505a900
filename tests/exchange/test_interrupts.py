"""Ctrl-C while a command imports: one word, no traceback; and other errors of that time keep theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from facility.exchange import interrupts
from tests.conftest import ROOT

COMMANDS = {
    "aggregation": ["-m", "coordinator.aggregate", "--help"],
    "preparing": ["-m", "facility.prepare", "--help"],
    "crossfed": ["-c", "import sys; sys.argv[0] = '/opt/bin/crossfed'; from coordinator.cli import main; main()"],
}


def started(command: list[str], folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """The end of a command that runs `line` where it imports numpy or typer."""
    for name in ("numpy", "typer"):
        (folder / f"{name}.py").write_text(f"import os, signal\n{line}\n")
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run([sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupt_while_a_command_imports_is_one_word(tmp_path: Path, name: str):
    done = started(COMMANDS[name], tmp_path, "raise KeyboardInterrupt")
    assert done.stderr == "interrupted\n" and done.returncode == -signal.SIGINT
    failed = started(COMMANDS[name], tmp_path, "raise RuntimeError('broken')")
    assert "Traceback" in failed.stderr and "broken" in failed.stderr and failed.returncode == 1


def test_a_script_of_another_keeps_its_own_traceback(tmp_path: Path):
    done = started(["-c", "import facility, coordinator, numpy"], tmp_path, "raise KeyboardInterrupt")
    assert "Traceback" in done.stderr


def test_in_a_job_the_traceback_is_back(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-m"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = sys.excepthook
    interrupts.word_while_importing()
    assert sys.excepthook is not before
    interrupts.traceback_again()
    assert sys.excepthook is interrupts._before


@pytest.mark.parametrize("step", ["make_context", "invoke"])
def test_an_interrupt_is_a_word_in_every_step_of_the_command_line(tmp_path: Path, step: str):
    """Typer makes an exit code of it without a word."""
    interrupt = "import typer.core\ndef stop(*a, **k): raise KeyboardInterrupt\n"
    script = f"{interrupt}typer.core.TyperGroup.{step} = stop\nfrom coordinator.cli import main\nmain()"
    done = subprocess.run([sys.executable, "-c", script, "schema"], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip() == "interrupted" and done.returncode == 130
