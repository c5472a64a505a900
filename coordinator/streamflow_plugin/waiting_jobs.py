"""StreamFlow's scheduler, where the end of a job wakes the first of those that wait for the same place, not all.

The original asks again for every waiting job whether it may start, whenever one ends: with hundreds of jobs that wait
for the cores of one machine, the square of their number. What decides is the same for all that ask for the same of the
same places, so that the others need not ask where the first of them is refused. They start in the order in which they
asked.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections import deque
from collections.abc import Iterable, MutableMapping
from typing import Any

from streamflow.core.deployment import Target
from streamflow.core.scheduling import AvailableLocation, Hardware, HardwareRequirement
from streamflow.core.workflow import Job, Status
from streamflow.scheduling.scheduler import DefaultScheduler, JobContext

from coordinator.streamflow_plugin.within import with_timeout

Request = tuple[Any, ...]
"""What decides whether a job may start: the places with what they have, and what is asked of each."""


class FirstComeScheduler(DefaultScheduler):
    """`scheduler: default`, the same settings and, but for the order among waiting jobs, the same decisions."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self._waiting: dict[Request, deque[asyncio.Future[None]]] = {}
        self._places: dict[Request, set[str]] = {}

    async def notify_status(self, job_name: str, status: Status) -> None:
        allocation = self.job_allocations.get(job_name)
        before = allocation.status if allocation is not None else None
        names = {place.name for place in _with_wrapped(allocation.locations)} if allocation is not None else set()
        await super().notify_status(job_name, status)
        if allocation is not None and allocation.status != before and allocation.status is not Status.RUNNING:
            for request, places in list(self._places.items()):
                if not places or places & names:
                    self._wake(request)

    def _wake(self, request: Request) -> None:
        """Let the first that waits for this ask again."""
        first = self._waiting[request][0]
        if not first.done():  # else it is about to
            first.set_result(None)

    async def _process_target(
        self, target: Target, job_context: JobContext, hardware_requirement: HardwareRequirement | None
    ) -> None:
        place: tuple[Request, asyncio.Future[None]] | None = None
        """This job's in a queue; it stays the first of it while it asks again."""
        try:
            while True:
                async with self.wait_queue, job_context.lock:
                    if job_context.scheduled:
                        return
                    asked = await self._ask(target, job_context, hardware_requirement, first=place)
                    if asked is None:
                        job_context.scheduled = True
                        return
                    request, places = asked
                    if place is not None and place[0] != request:
                        self._leave(*place)
                        place = None
                    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    queue = self._waiting.setdefault(request, deque())
                    self._places[request] = places
                    if place is not None:
                        queue[queue.index(place[1])] = future
                    else:
                        queue.append(future)
                    place = request, future
                try:
                    await with_timeout(self.retry_interval, future)
                except TimeoutError:
                    pass
        finally:
            if place is not None:
                self._leave(*place)

    def _leave(self, request: Request, future: asyncio.Future[None]) -> None:
        """Leave the queue; the first of those left asks again, since there may be room for more than one."""
        queue = self._waiting[request]
        queue.remove(future)
        if queue:
            self._wake(request)
        else:
            del self._waiting[request], self._places[request]

    async def _ask(
        self,
        target: Target,
        context: JobContext,
        requirement: HardwareRequirement | None,
        *,
        first: tuple[Request, asyncio.Future[None]] | None,
    ) -> tuple[Request, set[str]] | None:
        """None: the job has its places. Else what it waits for, and the names of the places that have to become free.

        As in the original, but that a job which has not waited yet is refused where others wait for the same.
        """
        connector = self.context.deployment_manager.get_connector(target.deployment.name)
        job = Job(
            name=context.job.name,
            workflow_id=context.job.workflow_id,
            inputs=context.job.inputs,
            input_directory=context.job.input_directory or target.workdir,
            output_directory=context.job.output_directory or target.workdir,
            tmp_directory=context.job.tmp_directory or target.workdir,
        )
        available: MutableMapping[str, AvailableLocation] = dict(
            await connector.get_available_locations(service=target.service)
        )
        hardware = requirement.eval(job) if requirement else Hardware()
        needed: dict[str, Hardware] = {}
        for location in available.values():
            for key, one in (await self._resolve_hardware_requirement(connector, location, hardware)).items():
                needed[key] = needed[key] | one if key in needed else one
        request = request_of(available.values(), needed, target.locations)
        names = {place.name for place in _with_wrapped(available.values())}
        if first is None and self._waiting.get(request):
            return request, names
        valid = {
            key: location
            for key, location in available.items()
            if self._is_valid(
                connector=connector, location=location, hardware_requirements=needed, job_name=context.job.name
            )
        }
        if len(valid) < target.locations:
            return request, names
        selected = await self._get_locations(
            job=context.job,
            hardware_requirement=hardware,
            locations=target.locations,
            scheduling_policy=self._get_policy(target.deployment.scheduling_policy),
            available_locations=valid,
        )
        if not selected:
            return request, names
        self._allocate_job(
            job=context.job, hardware=needed, connector=connector, selected_locations=selected, target=target
        )
        return None


def request_of(available: Iterable[AvailableLocation], needed: MutableMapping[str, Hardware], count: int) -> Request:
    """Equal for jobs of which all or none may start. Places with cores and memory are counted by name alone, over all
    deployments; others have slots, of each deployment."""
    places = [
        (
            place.name,
            None if place.hardware is not None else (place.location.deployment, place.slots),
            _amounts(place.hardware),
        )
        for place in _with_wrapped(available)
    ]
    amounts = sorted({(posixpath.basename(key), _amounts(hardware)) for key, hardware in needed.items()}, key=repr)
    return count, tuple(places), tuple(amounts)


def _amounts(hardware: Hardware | None) -> tuple[Any, ...] | None:
    if hardware is None:
        return None
    disks = sorted((disk.mount_point, disk.size) for disk in hardware.storage.values())
    return hardware.cores, hardware.memory, tuple(disks)


def _with_wrapped(places: Iterable[Any]) -> list[Any]:
    """Locations, and those behind them: of a queue, the host that it is on."""
    found = []
    for place in places:
        while place is not None:
            found.append(place)
            place = place.wraps if place.stacked else None
    return found
