"""StreamFlow's account of disks never keeps a job from being scheduled, however much the jobs before it left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from streamflow.core.deployment import ExecutionLocation
from streamflow.core.scheduling import Hardware, Storage
from streamflow.scheduling.scheduler import DefaultScheduler

from coordinator.streamflow_plugin import facility_steps

FREE = 1.0
"""Megabytes that were free when the run began."""


@pytest.mark.parametrize("deployment", ["coordinator", "facility-a"])
def test_jobs_that_have_ended_take_no_room(deployment: str, tmp_path: Path):
    """Ten jobs, each of which leaves a directory larger than what was free."""
    facility_steps.install()
    location = ExecutionLocation(name="__LOCAL__", deployment=deployment, local=True)
    (tmp_path / "left").write_bytes(b"\0" * (2 << 20))
    (tmp_path / "linked").hardlink_to(tmp_path / "left")
    whole = Hardware(cores=2, memory=1000, storage={"/": Storage("/", FREE)})
    needed = Hardware(cores=1, memory=1, storage={"/": Storage("/", 0.1, paths={str(tmp_path)})})
    scheduler: Any = DefaultScheduler.__new__(DefaultScheduler)
    scheduler.context, scheduler.hardware_locations = None, {}

    async def run_jobs() -> None:
        for _ in range(10):
            used = scheduler.hardware_locations.get(location.name, Hardware())
            assert (whole - used).satisfies(needed)
            scheduler.hardware_locations[location.name] = used + needed
            job = SimpleNamespace(locations=[location], hardware=needed, job="j")
            await scheduler._free_resources(None, job)

    asyncio.run(run_jobs())
