"""The engine is the StreamFlow of the Python that runs `crossfed`, wherever pip put it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from coordinator.config.federation import read_federation
from coordinator.engine import run
from facility.exchange.errors import InputError
from tests.federations import write_federation


def test_the_program_beside_python_is_taken(tmp_path: Path):
    federation = read_federation(write_federation(tmp_path, ["a", "b"]))
    assert run.engine_command(federation)[:2] == [str(Path(sys.executable).parent / "streamflow"), "run"]


def test_a_streamflow_without_a_program_beside_python_is_run_all_the_same(tmp_path: Path, monkeypatch):
    federation = read_federation(write_federation(tmp_path, ["a", "b"]))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    python, option, text, word = run.engine_command(federation)[:4]
    assert (python, option, word) == (str(tmp_path / "python3"), "-c", "run")
    assert ended_with(text, ["version"], monkeypatch) == 0
    assert ended_with(text, ["run"], monkeypatch) != 0, "a run that failed is not taken for one that ended well"


def ended_with(text: str, arguments: list[str], monkeypatch) -> int | str | None:
    """Exit code of `python -c TEXT ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["-c", *arguments])
    with pytest.raises(SystemExit) as ended:
        exec(text, {})
    return ended.value.code


def test_a_python_without_streamflow_is_refused(tmp_path: Path, monkeypatch):
    federation = read_federation(write_federation(tmp_path, ["a", "b"]))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="no module streamflow"):
        run.engine_command(federation)
