"""Waiting jobs start in order, never beyond what their place has, all of them, and cost the same each."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streamflow.core.scheduling import AvailableLocation, Hardware, HardwareRequirement, Storage
from streamflow.core.workflow import Job, Status
from streamflow.scheduling.scheduler import DefaultScheduler

from coordinator.streamflow_plugin.facility_steps import storage_usages
from coordinator.streamflow_plugin.waiting_jobs import FirstComeScheduler

CORES = 4
POLICY = SimpleNamespace(name="locality", type="data_locality", config={})


class Cores(HardwareRequirement):
    def __init__(self, cores: int) -> None:
        self.cores = cores

    @classmethod
    async def _load(cls, row: Any, loading_context: Any) -> Cores:
        raise NotImplementedError

    async def _save_additional_params(self, database: Any) -> Any:
        raise NotImplementedError

    def eval(self, job: Job) -> Hardware:
        return Hardware(cores=self.cores, memory=1, storage={"/": Storage("/", 1, paths={"/"})})


class Connector:
    """One machine, shared by all deployments on it, or so many slots of its own."""

    def __init__(self, name: str, slots: int | None) -> None:
        self.deployment_name, self.slots = name, slots

    async def get_available_locations(self, service: str | None = None) -> dict[str, AvailableLocation]:
        disk = {"/": Storage("/", 1e9)}
        hardware = Hardware(cores=CORES, memory=1e6, storage=disk) if self.slots is None else None
        place = AvailableLocation(
            name="machine", deployment=self.deployment_name, hostname="h", slots=self.slots, hardware=hardware
        )
        return {"machine": place}


@pytest.fixture(autouse=True)
def on_one_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    async def mount_point(context: Any, location: Any, path: str) -> str:
        return "/"

    monkeypatch.setattr("streamflow.data.utils.get_mount_point", mount_point)
    monkeypatch.setattr("streamflow.data.remotepath.get_storage_usages", storage_usages)


def scheduler_of(kind: type[DefaultScheduler], connectors: dict[str, Connector]) -> Any:
    context: Any = SimpleNamespace(deployment_manager=SimpleNamespace(get_connector=connectors.__getitem__))
    scheduler: Any = kind(context)
    scheduler.asked = 0
    valid = scheduler._is_valid

    def counted(*args: Any, **rest: Any) -> bool:
        scheduler.asked += 1
        return bool(valid(*args, **rest))

    scheduler._is_valid = counted
    return scheduler


async def run_jobs(scheduler: Any, jobs: list[tuple[str, int]], *, seed: int = 0) -> list[int]:
    """Jobs of a deployment and a number of cores, asked for in their order; the numbers as they started.

    Checked meanwhile: cores and slots in use.
    """
    rng, started = random.Random(seed), list[int]()
    used, running = {"cores": 0}, dict[str, int]()
    connectors = scheduler.context.deployment_manager.get_connector

    async def one(number: int, deployment: str, cores: int) -> None:
        place = SimpleNamespace(name=deployment, scheduling_policy=POLICY)
        target = SimpleNamespace(deployment=place, service=None, locations=1, workdir="/w")
        job = Job(f"/job{number}/0", 1, {}, None, None, None)
        await scheduler.schedule(job, SimpleNamespace(targets=[target], filters=[]), Cores(cores))
        started.append(number)
        slots = connectors(deployment).slots
        running[deployment] = running.get(deployment, 0) + 1
        used["cores"] += cores if slots is None else 0
        assert used["cores"] <= CORES and (slots is None or running[deployment] <= slots)
        await scheduler.notify_status(job.name, Status.RUNNING)
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        running[deployment] -= 1
        used["cores"] -= cores if slots is None else 0
        await scheduler.notify_status(job.name, rng.choice([Status.COMPLETED, Status.FAILED, Status.CANCELLED]))

    tasks = []
    for number, (deployment, cores) in enumerate(jobs):
        tasks.append(asyncio.create_task(one(number, deployment, cores)))
        for _ in range(3):
            await asyncio.sleep(0)
    async with asyncio.timeout(200):
        await asyncio.gather(*tasks)
    return started


jobs_of_facilities = st.lists(
    st.tuples(st.sampled_from(["a", "b", "queue"]), st.integers(min_value=1, max_value=CORES)), max_size=25
)


def connectors() -> dict[str, Connector]:
    return {"a": Connector("a", None), "b": Connector("b", None), "queue": Connector("queue", 2)}


@settings(max_examples=40, deadline=None)
@given(jobs=jobs_of_facilities, seed=st.integers(0, 9))
def test_all_jobs_start_within_what_there_is(jobs: list[tuple[str, int]], seed: int):
    scheduler = scheduler_of(FirstComeScheduler, connectors())
    started = asyncio.run(run_jobs(scheduler, jobs, seed=seed))
    assert sorted(started) == list(range(len(jobs))) and not scheduler._waiting and not scheduler._places
    for cores in range(1, CORES + 1):
        alike = [number for number in started if jobs[number] in [("a", cores), ("b", cores)]]
        assert alike == sorted(alike), "jobs that ask for the same start in their order"


def test_a_job_that_waits_costs_the_same_however_many_wait():
    """StreamFlow's own scheduler asks for each of them whenever one ends."""
    asked = {}
    for kind in (FirstComeScheduler, DefaultScheduler):
        for count in (20, 80):
            scheduler = scheduler_of(kind, connectors())
            asyncio.run(run_jobs(scheduler, [("ab"[number % 2], 2) for number in range(count)]))
            asked[kind, count] = scheduler.asked / count
    assert asked[FirstComeScheduler, 80] <= 3
    assert asked[DefaultScheduler, 80] > 2 * asked[DefaultScheduler, 20] > asked[FirstComeScheduler, 20]
