"""The engine is the StreamFlow of the Python that runs `crossfed`, wherever pip put it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from coordinator.config.federation import read_federation
from coordinator.engine import run
from facility.exchange.errors import InputError
from tests.federations import write_federation


def test_the_program_beside_python_is_taken(tmp_path: Path):
    federation = read_federation(write_federation(tmp_path, ["a", "b"]))
    assert run.engine_command(federation)[:2] == [str(Path(sys.executable).parent / "streamflow"), "run"]


def test_a_streamflow_without_a_program_beside_python_is_run_as_a_module(tmp_path: Path, monkeypatch):
    federation = read_federation(write_federation(tmp_path, ["a", "b"]))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    assert run.engine_command(federation)[:4] == [str(tmp_path / "python3"), "-m", "streamflow", "run"]
    assert find_spec("streamflow.__main__") is not None


def test_a_python_without_streamflow_is_refused(tmp_path: Path, monkeypatch):
    federation = read_federation(write_federation(tmp_path, ["a", "b"]))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="no module streamflow"):
        run.engine_command(federation)
