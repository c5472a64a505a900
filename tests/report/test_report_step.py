"""The workflow's last step: whatever keeps the page from being written, the federation is finished."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from coordinator.config.settings import CoordinatorSettings
from coordinator.steps import report
from tests.report.made import made_archive


@pytest.mark.parametrize("error", [ValueError("a figure that is none"), KeyError("x"), OSError("disk")])
def test_a_page_that_cannot_be_made_fails_no_federation(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fails(*_: object, **__: object) -> None:
        raise error

    archive = made_archive(tmp_path / "a", facilities=2, rounds=1)
    settings = CoordinatorSettings(federation="made", rounds=1, facilities=["facility-00", "facility-01"])
    monkeypatch.setattr(report, "read_coordinator_settings", lambda _: settings)
    monkeypatch.setattr(report, "gather", fails)
    out = tmp_path / "summary.json"
    words = ["report", "--federation", "coordinator.json", "--archive", str(archive.path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    assert report.main() == 0
    assert len(json.loads(out.read_text())["rounds"]) == 1 and "facility-00" in capsys.readouterr().out
