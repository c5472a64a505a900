"""Every file that states its format is told as newer before a key of it is called unknown, and as none below 1."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.archive.rounds import Archive
from coordinator.config.settings import read_coordinator_settings
from coordinator.planning.budget import budget_from_json
from coordinator.problem.read import read_problem
from coordinator.simulation.described import read_scenario
from facility.dataset import open_dataset
from facility.exchange.errors import InputError
from facility.exchange.masking.roster import read_agreement
from facility.exchange.masking.shares import read_shares
from facility.exchange.messages.emulation import read_trace
from facility.exchange.messages.manifest import RUN, Manifest, read_manifest, run_of
from facility.exchange.messages.plan import read_plan
from facility.exchange.messages.report import read_failure, read_report
from facility.exchange.messages.settings import read_facility_settings
from facility.exchange.scheduling.group_state import GroupState
from facility.training.state.state import read_state_of


def _restored(path: Path) -> Any:
    return GroupState.restore(json.loads(path.read_text()))


PLAN = {"stages": 1, "replicas": 1, "grid": [[0]], "stage_units": [[0, 1]]}
PROBLEM = {"devices": [], "links": {}, "units": []}
READERS: dict[str, tuple[str, dict[str, Any], Callable[[Path], Any]]] = {
    "plan": ("plan.json", PLAN, read_plan),
    "problem": ("problem.json", PROBLEM, read_problem),
    "budget": ("budget.json", {}, lambda path: budget_from_json(json.loads(path.read_text()), file=path)),
    "simulated federation": ("federation.json", {}, read_scenario),
    "facility settings": ("facility.json", {}, read_facility_settings),
    "coordinator settings": ("coordinator.json", {}, read_coordinator_settings),
    "round": ("round-0000/round.json", {}, lambda path: Archive(path.parents[1]).read_round(0)),
    "dataset": ("dataset.json", {}, lambda path: open_dataset(path.parent)),
    "manifest": ("manifest.json", {}, lambda path: read_manifest(path.parent)),
    "report": ("report.json", {}, lambda path: read_report(path.parent)),
    "failure": ("failure.json", {}, lambda path: read_failure(path.parent)),
    "agreement": ("agreement.json", {}, lambda path: read_agreement(path.parent)),
    "shares": ("shares.json", {}, read_shares),
    "trace": ("trace.json", {"workers": {}}, read_trace),
    "scheduler": ("groups.json", {}, _restored),
    "state": ("round-0/state.json", {}, lambda path: read_state_of(path.parent, None)),  # type: ignore[arg-type]
}


def said_of(reader: str, tmp_path: Path, version: object, **more: object) -> str:
    name, needed, read = READERS[reader]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**needed, "format": version, **more}))
    with pytest.raises(InputError) as caught:
        read(path)
    return str(caught.value)


@pytest.mark.parametrize("reader", READERS)
def test_a_newer_format_is_told_as_such_whatever_it_holds(reader: str, tmp_path: Path):
    said = said_of(reader, tmp_path, 99, a_key_of_a_later_version=1)
    assert "format 99" in said and "a_key_of_a_later_version" not in said
    assert "update CrossFed" in said or "render again with this version" in said
    assert "rewind" not in said and "remove" not in said


@pytest.mark.parametrize("reader", ["round", "dataset", "facility settings", "coordinator settings"])
def test_a_key_of_a_later_version_within_a_format_is_told_as_such(reader: str, tmp_path: Path):
    """A round's file of a newer version asked for `crossfed rewind`, and others only listed every key that is known."""
    more: dict[str, Any] = {"splits": {}, "sources": []} if reader == "dataset" else {}
    said = said_of(reader, tmp_path, 1, a_key_of_a_later_version=1, **more)
    assert "a_key_of_a_later_version is a key that is unknown here: a newer CrossFed wrote it" in said
    assert "update CrossFed" in said or "render again with this version" in said
    assert "rewind" not in said and "known keys are" not in said and "malformed" not in said


@pytest.mark.parametrize("version", [0, -1, True, 1.5, "1", None])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_format_is_refused_for_it(reader: str, version: object, tmp_path: Path):
    assert "format" in said_of(reader, tmp_path, version)


@pytest.mark.parametrize("version", [0, -1])
@pytest.mark.parametrize("reader", ["plan", "problem"])
def test_the_format_is_the_only_fault(reader: str, version: int, tmp_path: Path):
    assert f"format is {version}, expected a whole number from 1 to 1" in said_of(reader, tmp_path, version)


@pytest.mark.parametrize(("extra", "run"), [({}, ""), ({RUN: None}, ""), ({RUN: ""}, ""), ({RUN: "2b7e"}, "2b7e")])
def test_a_manifest_of_a_version_without_runs_is_of_no_run(extra: dict[str, Any], run: str):
    assert run_of(Manifest(kind="model", federation="heron", round=0, extra=extra)) == run
