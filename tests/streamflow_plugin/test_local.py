"""A facility's job on this machine knows nothing of the run's private event file; the coordinator's steps do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from streamflow.core.deployment import ExecutionLocation

from coordinator.events.event import VARIABLE
from coordinator.streamflow_plugin.local import TellingLocalConnector


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


@pytest.mark.parametrize("folder", ["a folder", "Zoé's", "$HOME; false"])
def test_a_step_runs_in_its_directory_whatever_that_is_called(folder: str, tmp_path: Path):
    (place := tmp_path / folder).mkdir()
    connector = TellingLocalConnector("coordinator", str(tmp_path))
    location = ExecutionLocation(name="local", deployment="coordinator", local=True)
    act = connector.run(
        location=location, command=["pwd"], capture_output=True, workdir=str(place), job_name="/rounds/aggregate/0"
    )
    assert asyncio.run(act) == (str(place), 0)
