"""`crossfed status` shows what facilities said as they said it, on whatever terminal, wherever the archive is."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator import cli
from coordinator.archive.rounds import Archive, FacilityRow, RoundFile
from coordinator.archive.summary import summary
from coordinator.commands.watch import _complete, _print_progress
from coordinator.config.federation import read_federation
from coordinator.report.make import make_report
from facility.exchange.files.durable import write_json
from tests.conftest import ROOT

REASON = "connect to login:100: refused :key: [/red] Größe 山"


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    """One round in which a facility failed, in an archive whose path holds brackets."""
    archive = Archive(tmp_path / "[bold]")
    archive.round_directory(0).mkdir(parents=True)
    rows = [FacilityRow(round=0, facility="a", status="failed", reason=REASON)]
    record = RoundFile(round=0, facilities=rows, global_loss=2.0, decision="go on", guard=REASON)
    write_json(archive.round_directory(0) / "round.json", dataclasses.asdict(record))
    path = tmp_path / "federation.yml"
    path.write_text("name: f\nmodel: m\nrounds: 2\narchive: '[bold]'\nfacilities: [{name: a, dataset: /d}]\n")
    return path


def test_no_text_is_taken_for_markup_or_for_the_name_of_a_picture(federation: Path, capsys: pytest.CaptureFixture[str]):
    """`:100:` within an error was shown as a picture, and brackets in the archive's path were left out."""
    described = read_federation(federation)
    _print_progress(described, summary(Archive(described.archive_path)))
    told = capsys.readouterr().out
    assert f"round 0: {REASON}" in told and "login:100:" in told.split("round 0:")[0] and "[bold]" in told


@pytest.mark.parametrize(
    ("done", "wanted", "said"),
    [
        (0, 1, "0 of 1 round is complete"),
        (1, 1, "1 of 1 round is complete"),
        (1, 2, "1 of 2 rounds is complete"),
        (2, 5, "2 of 5 rounds are complete"),
        (3, 2, "3 rounds are complete, 2 were asked for,"),
    ],
)
def test_the_first_line_counts_as_people_do(done: int, wanted: int, said: str):
    """`rounds` may be lowered below what the archive holds: "3 of 2 rounds are complete" was said then."""
    assert _complete(done, wanted) == said


def test_a_terminal_that_lacks_letters_stops_no_command(federation: Path):
    environment = os.environ | {"PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "coordinator.cli", "status", "-f", str(federation)]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert REASON.replace("山", "\\u5c71").encode("latin-1") in done.stdout


def test_a_command_that_is_interrupted_says_so(
    federation: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Typer makes an exit code of Ctrl-C: every command but those of modules ended without a word."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt  # as Python's handler of SIGINT, which is not there where tests run in the background

    monkeypatch.setattr("coordinator.commands.watch._progress", interrupted)
    monkeypatch.setattr(sys, "argv", ["crossfed", "status", "-f", str(federation)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 130 and capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("name", "format", "begins"),
    [("r.md", "", "# "), ("r.JSON", "", "{"), ("r.txt", "", "<!doctype"), ("r.md", "html", "<!doctype")],
)
def test_a_report_has_the_format_that_its_file_is_named_by(federation: Path, name: str, format: str, begins: str):
    """`crossfed report --out report.md` wrote HTML."""
    assert make_report(federation, federation.parent / name, format).read_text().startswith(begins)
