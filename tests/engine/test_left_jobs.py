"""A facility that leaves after a run that was killed leaves no job behind in its queue."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from coordinator.config.federation import read_federation
from coordinator.engine.left_jobs import cancel_left
from coordinator.engine.render import write
from tests.federations import write_federation

FLUX = """#!/bin/bash
echo "$*" >> "$CALLS"
case "$*" in
  *--name=crossfed-pico-gone*-o\\ {id}) echo f7 ;;
  *--name=crossfed-pico-gone*) echo "f7 SCHED urgency=16" ;;
esac
[ -z "$DOWN" ] || { echo "flux_open: no broker" >&2; exit 1; }
"""


@pytest.mark.parametrize("down", ["", "yes"])
def test_its_job_is_cancelled_and_told_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, down: str):
    file = write_federation(tmp_path, ["stays", "gone"], rounds=1)
    described = yaml.safe_load(file.read_text())
    for one in described["facilities"]:
        one["deployment"] = {
            "type": "flux",
            "workdir": str(tmp_path / "jobs"),
            "template": "flux",
            "fill": {"bank": "a", "queue": "q"},
            "environment": {"home": str(tmp_path)},
        }
    file.write_text(yaml.safe_dump(described))
    write(read_federation(file))
    described["facilities"] = described["facilities"][:1]
    file.write_text(yaml.safe_dump(described))
    program = tmp_path / "bin" / "flux"
    program.parent.mkdir()
    program.write_text(FLUX)
    program.chmod(0o755)
    calls = tmp_path / "calls"
    calls.touch()
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("DOWN", down)
    console = Console(file=io.StringIO(), width=200)
    cancel_left(read_federation(file), console)
    told = console.file.getvalue()
    assert "stays" not in calls.read_text() and "stays" not in told
    assert ("cancel f7" in calls.read_text()) == (not down)
    assert ("may be left in its queue" if down else "cancelled job f7 (SCHED) at gone") in told, told
    described["name"] = "another"
    file.write_text(yaml.safe_dump(described))
    calls.write_text("")
    cancel_left(read_federation(file), console)
    assert not calls.read_text(), "what another federation rendered here is none of this one's"
