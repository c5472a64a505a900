"""The engine is the StreamFlow of the Python that runs `crossfed`, wherever pip put it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

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


def test_the_run_notes_how_long_a_job_of_each_facility_may_take(tmp_path: Path):
    """By its template, or `options:`; of a facility that says neither, nothing is noted."""
    file = write_federation(tmp_path, ["a", "b", "c"])
    described = yaml.safe_load(file.read_text())
    file.with_name("job.sh").write_text("#!/bin/sh\n#SBATCH --time=01:30:00\n{{ streamflow_command }}\n")
    queue = {"type": "slurm", "template": "job.sh", "host": "login", "user": "u", "key": "/k", "workdir": "/scratch"}
    described["facilities"][0]["deployment"] = queue
    described["facilities"][1]["deployment"] = queue | {"options": {"time": "10"}}
    file.write_text(yaml.safe_dump(described))
    assert run.job_limits(read_federation(file)) == {"a": 5400.0, "b": 600.0}
