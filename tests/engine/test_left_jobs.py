"""A facility that leaves, or moves, after a run that was killed leaves no job behind in its queue."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from coordinator.archive.rewind import rewind
from coordinator.archive.rounds import Archive, RoundFile
from coordinator.config.federation import read_federation
from coordinator.engine.left_jobs import cancel_left, cancel_set_aside, remember_queues
from coordinator.engine.queues import Queue
from coordinator.engine.render import write_rendered
from coordinator.engine.run import render_alone
from coordinator.rounds.late import LateJob, remember_job
from facility.exchange.files.durable import write_json
from tests.federations import write_federation

FLUX = """#!/bin/bash
echo "$*" >> "$CALLS"
case "$*" in
  *--name=crossfed-pico-gone*-o\\ {id}) echo f7 ;;
  *--name=crossfed-pico-gone*) echo "f7 SCHED urgency=16" ;;
esac
[ -z "$DOWN" ] || { echo "flux_open: no broker" >&2; exit 1; }
"""


def rendered(tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch, flux: str) -> tuple[Path, Path]:
    """A federation of facilities with Flux, rendered: its federation.yml, and the file that has the calls of `flux`."""
    file = write_federation(tmp_path, names, rounds=9)
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
    write_rendered(read_federation(file))
    program = tmp_path / "bin" / "flux"
    program.parent.mkdir()
    program.write_text(flux)
    program.chmod(0o755)
    calls = tmp_path / "calls"
    calls.touch()
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    return file, calls


AT_WORK = """#!/bin/bash
echo "$*" >> "$CALLS"
name=$(sed -n 's/.*--name=crossfed-pico-\\([a-z]*\\).*/\\1/p' <<< "$*")
case "$*" in
  *--name=*-o\\ {id}) echo "f$name" ;;
  *--name=*) echo "f$name RUN urgency=16" ;;
esac
"""


def test_after_a_rewind_jobs_of_rounds_that_were_set_aside_are_cancelled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`early` has a late job of a round that stands, `late` one of a round that does not."""
    names = ["prompt", "early", "late"]
    file, calls = rendered(tmp_path, names, monkeypatch, AT_WORK)
    federation = read_federation(file)
    archive = Archive(federation.archive_path)
    archive.begin(tmp_path / "model", "pico")
    for number in range(4):
        shutil.copytree(archive.model_for(0), archive.model_for(number + 1))
        made = RoundFile(round=number, facilities=[], global_loss=None, decision="go on")
        write_json(archive.round_directory(number) / "round.json", dataclasses.asdict(made))
    for name, number in (("early", 1), ("late", 3)):
        remember_job(federation.workdir_path / "coordinator", LateJob(facility=name, round=number, directory="/there"))

    def told() -> list[str]:
        calls.write_text("")
        said = io.StringIO()
        cancel_set_aside(federation, archive, Console(file=said, width=200))
        return said.getvalue().splitlines()

    assert told() == [] and not calls.read_text(), "there was no rewind"
    rewind(archive, 2)
    said = [f"cancelled job f{n} (RUN) at {n}, of a round that crossfed rewind set aside" for n in ("late", "prompt")]
    assert told() == said
    assert "cancel flate" in calls.read_text() and "cancel fearly" not in calls.read_text()
    assert told() == [] and not calls.read_text(), "what is there now is a job of the repeated round"


@pytest.mark.parametrize("down", ["", "yes"])
def test_its_job_is_cancelled_and_told_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, down: str):
    file, calls = rendered(tmp_path, ["stays", "gone"], monkeypatch, FLUX)
    described = yaml.safe_load(file.read_text())
    described["facilities"] = described["facilities"][:1]
    file.write_text(yaml.safe_dump(described))
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


def test_a_facility_that_left_before_somebody_rendered_leaves_no_job_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`crossfed render` after the edit replaces what names the queue: its job was looked for nowhere, and ran."""
    file, calls = rendered(tmp_path, ["stays", "gone"], monkeypatch, FLUX)
    federation = read_federation(file)
    federation.workdir_path.mkdir(parents=True)
    remember_queues(federation)  # as a run does, which is killed then
    described = yaml.safe_load(file.read_text())
    described["facilities"] = described["facilities"][:1]
    file.write_text(yaml.safe_dump(described))
    render_alone(read_federation(file))
    console = Console(file=io.StringIO(), width=200)
    cancel_left(read_federation(file), console)
    assert "cancel f7" in calls.read_text() and "stays" not in calls.read_text()
    assert console.file.getvalue().splitlines() == ["cancelled job f7 (SCHED) at gone, which has left the federation"]
    remember_queues(read_federation(file))
    calls.write_text("")
    cancel_left(read_federation(file), console)
    assert not calls.read_text(), "once a run goes on without it, it is asked for nothing"


@pytest.mark.parametrize(
    ("at_new", "cancelled", "words"),
    [
        ("", ["old"], "cancelled job f7 (RUN) at site, which is reached elsewhere now"),
        ("f7 RUN urgency=16", [], ""),
        (None, [], "jobs of it may be left in its queue"),
    ],
    ids=["another cluster", "another login node", "no answer"],
)
def test_a_facility_that_moved_leaves_no_job_at_its_old_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_new: str | None, cancelled: list[str], words: str
):
    """Unless its new login node lists the same job: that is waited for, and its update is used."""
    file = write_federation(tmp_path, ["site", "other"], rounds=1)
    described = yaml.safe_load(file.read_text())
    deployment = {
        "type": "flux",
        "host": "old",
        "workdir": "/w",
        "template": "flux",
        "fill": {"bank": "a", "queue": "q"},
    }
    described["facilities"][0]["deployment"] = deployment
    file.write_text(yaml.safe_dump(described))
    write_rendered(read_federation(file))
    asked: list[tuple[str, str]] = []

    async def login(queue: Queue, command: str) -> tuple[str, int]:
        host = queue.ssh["nodes"][0]
        asked.append((host, command))
        said = {"old": "f7 RUN urgency=16", "new": at_new}[host]
        return (said, 0) if said is not None else ("flux_open: no broker", 1)

    monkeypatch.setattr("coordinator.engine.queues._login", login)
    console = Console(file=io.StringIO(), width=200)
    cancel_left(read_federation(file), console)
    assert asked == [], "nothing has moved"
    deployment["host"] = "new"
    file.write_text(yaml.safe_dump(described))
    cancel_left(read_federation(file), console)
    assert [host for host, command in asked if "flux cancel" in command] == cancelled
    told = console.file.getvalue()
    assert words in told and bool(words) == bool(told), told
