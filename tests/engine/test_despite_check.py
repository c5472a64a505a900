"""`crossfed run` starts nothing while the coordinator's own checks fail, or the last `crossfed check` did, unless it is
told to."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config.federation import Federation, read_federation
from coordinator.engine import run
from coordinator.preflight import check, coordinator
from coordinator.preflight.row import Row, fail, ok
from tests.federations import write_federation


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


def test_a_check_that_failed_stops_the_run_until_it_passes_or_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = write_federation(tmp_path, ["a", "b"])
    rows: list[Row] = []
    started: list[Path] = []
    monkeypatch.setattr(check, "_check", lambda *_, **__: rows)
    monkeypatch.setattr(coordinator, "failing_here", lambda _: [])
    monkeypatch.setattr(run, "run_federation", lambda file, **_: started.append(file) or 0)

    def call(*words: str) -> str:
        result = CliRunner().invoke(app, [*words, "-f", str(file)])
        return str(result.exception)

    def runs() -> bool:
        before, said = len(started), call("run")
        assert (len(started) > before) == (said in ("None", "0")), said
        return len(started) > before

    refused = fail("b", "job accepted", "the partition is not one of this cluster's", "correct it")
    rows[:] = [ok("a", "dataset", "there"), refused]
    call("check")
    said = call("run")
    assert "b, job accepted: the partition is not" in said and "--despite-check" in said and not started
    call("run", "--despite-check")
    assert len(started) == 1 and not runs()
    rows[:] = [fail("b", "connection", "the certificate has expired", "crossfed login b")]
    call("check")
    assert runs(), "a run waits for a login by itself"
    rows[:] = [refused] * 5
    call("check")
    assert "and 2 more" in call("run")
    text = file.read_text()
    file.write_text(text + "# corrected\n")
    assert runs()
    file.write_text(text)
    assert not runs()
    rows[:] = [ok("b", "job accepted", "yes")]
    call("check")
    assert runs() and not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize("name", ["c#", "is it?", "100%25", "100%", "a 'dir' \"ü\" [x]*$"])
def test_a_path_that_is_another_one_as_a_url_is_refused_before_a_run(name: str, tmp_path: Path):
    """StreamFlow was started again and again, since /tmp/100 had no main.cwl, or a step had a file that did not exist.
    Runs in folders of the last two names came to their end."""
    plain = _described(tmp_path)
    for federation, key in (
        (_described(tmp_path / name), "federation.yml"),
        (dataclasses.replace(plain, workdir=f"../{name}"), "workdir"),
        (dataclasses.replace(plain, model=f"../{name}"), "model"),
    ):
        refused = [row.check for row in coordinator.failing_here(federation) if "URL" in row.found]
        assert refused == ([key] if name in ("c#", "is it?", "100%25") else [])


def _described(folder: Path) -> Federation:
    """A federation in that folder, whose model and data are not there."""
    (folder / "workflow").mkdir(parents=True)
    file = folder / "workflow" / "federation.yml"
    file.write_text("{name: f, rounds: 1, model: ../model, facilities: [{name: a, dataset: ../data}]}")
    return read_federation(file)
