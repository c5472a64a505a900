"""A facility's job on this machine knows nothing of the run's private event file; the coordinator's steps do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from streamflow.core.deployment import ExecutionLocation

from coordinator.events.event import VARIABLE
from coordinator.report.advice import advice_for
from coordinator.rounds.lost import read_lost
from coordinator.streamflow_plugin.local import TellingLocalConnector
from coordinator.streamflow_plugin.this_run import RoundAtFacility, this_round


@pytest.mark.parametrize(("name", "seen"), [("facility-a", "none"), ("coordinator", "file")])
def test_only_the_coordinators_steps_have_the_event_file(name: str, seen: str, tmp_path: Path, monkeypatch):
    events = tmp_path / "file"
    events.touch()
    monkeypatch.setenv(VARIABLE, str(events))
    connector = TellingLocalConnector(name, str(tmp_path))
    location = ExecutionLocation(name="local", deployment=name, local=True)
    command = [f'basename "${{{VARIABLE}:-none}}"']

    async def act() -> tuple[str, int] | None:
        return await connector.run(
            location=location, command=command, capture_output=True, workdir=str(tmp_path), job_name="/rounds/train_a/0"
        )

    assert asyncio.run(act()) == (seen, 0)


@pytest.mark.parametrize("folder", ["a folder", "Zoé's", "$HOME; false", "\"a' `false` \\$x"])
def test_a_step_runs_in_its_directory_whatever_that_is_called(folder: str, tmp_path: Path):
    """Its HOME and TMPDIR lie there: a path with a double quote or a dollar ended every run with a code and no word."""
    (place := tmp_path / folder).mkdir()
    connector = TellingLocalConnector("coordinator", str(tmp_path))
    location = ExecutionLocation(name="local", deployment="coordinator", local=True)
    act = connector.run(
        location=location,
        command=['echo "$PWD:$HOME"'],
        environment={"HOME": str(place)},
        capture_output=True,
        workdir=str(place),
        job_name="/rounds/aggregate/0",
    )
    assert asyncio.run(act) == (f"{place}:{place}", 0)


@pytest.mark.parametrize(
    ("deployment", "step"),
    [("facility-a", "train_a"), ("facility-a-login", "keys_a"), ("facility-a-login", "unmask_a")],
)
def test_the_round_is_told_how_a_job_ended_that_left_nothing(deployment: str, step: str, tmp_path: Path):
    """It said that the job was not taken, was cancelled, ran out of time or lost its node, and none of these was so;
    and a facility's commands on its login node, which is this machine, were those of a facility `a-login`."""
    connector = TellingLocalConnector(deployment, str(tmp_path))
    location = ExecutionLocation(name="local", deployment=deployment, local=True)

    async def act() -> None:
        this_round.set(RoundAtFacility(facility="a", number=3, workdir=tmp_path))
        await connector.run(
            location=location,
            command=["echo no module python/3.11; kill -9 $$"],
            capture_output=True,
            workdir=str(tmp_path),
            job_name=f"/rounds/{step}/0",
        )

    asyncio.run(act())
    said = read_lost(tmp_path / "a-step", 3, "a")
    assert said == "left no update: a: its job ended with code -9: no module python/3.11"
    assert "killed" in advice_for(said)
