"""Where rounds do not wait, a facility's job waits for no place of the engine's."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from streamflow.core.scheduling import Hardware, Storage
from streamflow.core.workflow import Job
from streamflow.cwl.hardware import CWLHardwareRequirement

from coordinator.events.event import VARIABLE
from coordinator.events.follow import EventFile
from coordinator.streamflow_plugin.facility_steps import making_directories
from coordinator.streamflow_plugin.staging import AtOnce, schedule_at_once


def test_more_facilities_on_this_machine_than_cores_all_begin():
    asked: dict[str, Hardware] = {}
    disks = {"disk": Storage(os.sep, 1e6)}
    left = Hardware(cores=0.0, memory=0.0, storage=disks)

    class Scheduler:
        async def schedule(self, job: Job, binding: Any, requirement: Any) -> None:
            asked[job.name] = requirement.eval(job)

        def get_allocation(self, name: str) -> Any:
            raise LookupError

    step = SimpleNamespace(
        binding_config=SimpleNamespace(targets=[SimpleNamespace(deployment=SimpleNamespace(name="facility-a"))]),
        workflow=SimpleNamespace(context=SimpleNamespace(scheduler=Scheduler())),
        hardware_requirement=CWLHardwareRequirement(cwl_version="v1.2", cores=1, memory=256),
    )
    for number in range(3):
        job = Job("train_a/0." + str(number), 0, {}, "/in", "/out", "/tmp")
        with pytest.raises(LookupError):
            asyncio.run(schedule_at_once(None)(step, job))
        assert left.satisfies(asked[job.name]), "no core and no memory is left, and it begins"
    assert AtOnce(None).eval(job).cores == 0.0


@pytest.mark.parametrize("make", [making_directories, schedule_at_once])
def test_a_step_of_the_coordinators_that_gets_no_directory_is_reported(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its directory had become read-only: the engine ended without a word why, and waited for ever when begun anew."""

    async def refused(self: Any, job: Job) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "work/coordinator/1")

    events = EventFile(tmp_path / "events.jsonl")
    monkeypatch.setenv(VARIABLE, str(events.path))
    step = SimpleNamespace(
        binding_config=SimpleNamespace(targets=[SimpleNamespace(deployment=SimpleNamespace(name="coordinator"))])
    )
    with pytest.raises(OSError):
        asyncio.run(make(refused)(step, job=Job("/rounds/receive_a/0", 0, {}, "/in", "/out", "/tmp")))
    (event,) = events.new()
    assert (event.kind, event["step"], event["futile"]) == ("failed", "/rounds/receive_a", True)
    assert "work/coordinator/1 is mounted read-only" in event["reason"]
