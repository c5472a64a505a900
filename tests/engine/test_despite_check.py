"""`crossfed run` starts nothing while the coordinator's own checks fail, unless it is told to."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.engine import run


def test_a_failing_check_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{damaged")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text("{}")
    file = tmp_path / "federation.yml"
    one = {"name": "a", "dataset": "data", "deployment": {"type": "local"}}
    file.write_text(yaml.safe_dump({"name": "f", "rounds": 1, "model": "model", "facilities": [one]}))
    started: list[Path] = []
    monkeypatch.setattr(run, "run_federation", lambda file, **_: started.append(file) or 0)
    result = CliRunner().invoke(app, ["run", "-f", str(file)])
    assert not started and "model: " in str(result.exception) and "--despite-check" in str(result.exception)
    assert CliRunner().invoke(app, ["run", "-f", str(file), "--despite-check"]).exit_code == 0 and started == [file]
