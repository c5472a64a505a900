"""Where rounds do not wait, a facility's job waits for no place of the engine's."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest
from streamflow.core.scheduling import Hardware, Storage
from streamflow.core.workflow import Job
from streamflow.cwl.hardware import CWLHardwareRequirement

from coordinator.streamflow_plugin.staging import AtOnce, scheduling


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
            asyncio.run(scheduling(None)(step, job))
        assert left.satisfies(asked[job.name]), "no core and no memory is left, and it begins"
    assert AtOnce(None).eval(job).cores == 0.0
