"""A queue connector whose next job is in the queue before the round that it is for, where the user asks for it.

The round's job is looked for and submitted as ever (`coordinator.streamflow_plugin.patient`); between both, one that is
in the queue already is given the round (`coordinator.streamflow_plugin.placeholder`).
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, MutableMapping, MutableSequence
from contextlib import suppress
from typing import Any

from streamflow.core import utils
from streamflow.core.deployment import ExecutionLocation
from streamflow.core.exception import WorkflowExecutionException
from streamflow.deployment.connector.queue_manager import QueueManagerConnector
from streamflow.deployment.wrapper import get_inner_location

from coordinator.config.settings import CoordinatorSettings
from coordinator.rounds.ahead import remembered_placeholder
from coordinator.schedulers.directives import hours_asked, nodes_asked
from coordinator.schedulers.scheduler import BatchScheduler, Job
from coordinator.streamflow_plugin.gate import GatedSSHConnector, GateRefused
from coordinator.streamflow_plugin.handing_over import ByGate, ByShell, Submission
from coordinator.streamflow_plugin.patient import REFUSED, PatientQueue
from coordinator.streamflow_plugin.placeholder import Ahead
from coordinator.streamflow_plugin.this_run import RoundAtFacility, settings_of_run, this_round
from facility.exchange.job_names import waiting_name
from facility.exchange.messages.ahead import SUFFIX


class AheadQueue(PatientQueue):
    """A patient queue with jobs submitted ahead; its settings are in coordinator.json, not those of the connector."""

    _ahead: Ahead | None = None
    _place: ExecutionLocation | None = None
    """Where the latest job of a round was submitted."""
    _commands: MutableMapping[str, str]
    """By the engine's name of a job: its command, before it is put into the job template."""

    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, **settings)
        self._commands = {}

    async def run(
        self,
        location: ExecutionLocation,
        command: MutableSequence[str],
        environment: MutableMapping[str, str] | None = None,
        workdir: str | None = None,
        *args: Any,
        job_name: str | None = None,
        **rest: Any,
    ) -> tuple[str, int] | None:
        if job_name:
            self._commands[job_name] = utils.create_command(
                class_name=self.__class__.__name__, command=command, environment=environment, workdir=workdir
            )
        return await super().run(location, command, environment, workdir, *args, job_name=job_name, **rest)

    async def _put(
        self, command: str, environment, job_name: str, location: ExecutionLocation, workdir=None, **rest
    ) -> str:
        round, own = this_round.get(), self.__dict__.get("_commands", {}).pop(job_name, "")
        ahead = self._ahead_of(round) if round is not None and own and workdir else None
        if ahead is None or round is None:
            return await super()._put(command, environment, job_name, location, workdir, **rest)
        one = Submission(command=own, job_name=job_name, workdir=workdir, environment=environment, streams=rest)
        job_id = await ahead.take(one, location)
        if job_id is None:
            job_id = await super()._put(command, environment, job_name, location, workdir, **rest)
        if not job_id.startswith(REFUSED):
            self._place = location
            ahead.follow(job_id, one, location, round)
        return job_id

    def _ahead_of(self, round: RoundAtFacility) -> Ahead | None:
        """What is kept of this facility's jobs that are ahead; None where there is nothing to keep."""
        if self._ahead is None and self._hands_over and (settings := settings_of_run()) is not None:
            wanted = settings.ahead.get(round.facility)
            if wanted is not None or remembered_placeholder(round.workdir, round.facility) is not None:
                self._ahead = Ahead(
                    self,
                    facility=round.facility,
                    workdir=round.workdir,
                    settings=wanted,
                    rounds=jobs_of(settings),
                    reach=ByShell(self) if self._gate is None else ByGate(self),
                )
        return self._ahead

    @property
    def _hands_over(self) -> bool:
        """A round can be given to a job that waits: by a shell, or by a gate's request."""
        return self._gate is None or isinstance(self._gate, GatedSSHConnector)

    def _note_begins(self, states: dict[str, str]) -> None:
        before = set(self._begun)
        super()._note_begins(states)
        if self._ahead is not None:
            for one in self._begun - before:
                if states[one] not in self.scheduler.terminal:  # else it was never seen at work, which times nothing
                    self._ahead.job_began(one)

    async def _get_returncode(self, job_id: str, location: ExecutionLocation) -> int:
        code = await super()._get_returncode(job_id, location)
        if self._ahead is not None:
            await self._ahead.job_ended(job_id, location)
        return code

    async def undeploy(self, external: bool) -> None:
        if self._ahead is not None and self._place is not None:
            await self._ahead.drop(self._place)
        await super().undeploy(external)

    async def answer_to(
        self, location: ExecutionLocation, command: str, read: Callable[[str, int], bool | None]
    ) -> bool:
        return await self._ask(location, command, read)

    async def states_of(self, ids: list[str], location: ExecutionLocation) -> dict[str, str]:
        asked = self._overdue.now()
        states = await self._states(ids, location)
        self._overdue.see(states, asked)  # a job's limit runs while it waits for its model
        return states

    async def placeholders(self, location: ExecutionLocation) -> list[Job]:
        name = self._name(self._beside(location))
        with suppress(GateRefused):  # by a gate of an earlier version, which has never submitted one
            return await self._jobs_named(name, location) if name else []
        return []

    async def make_way_ahead(self, location: ExecutionLocation, spare: str = "") -> None:
        if name := self._name(self._beside(location)):
            with suppress(GateRefused):
                await self._make_way(name, location, spare)

    async def submit_ahead(self, one: Submission, location: ExecutionLocation) -> str:
        script = one.command
        if self._gate is None:
            script = self.template_map.get_command(one.command, location.service, None, one.workdir)
        beside, environment = self._beside(location), dict(one.environment or {}) or None
        job_id = await super()._put(script, environment, one.job_name, beside, one.workdir, **dict(one.streams))
        if job_id.startswith(REFUSED):
            raise WorkflowExecutionException(self._endings.pop(job_id).detail)
        return job_id

    def nodes_of(self, location: ExecutionLocation) -> int:
        if self._gate is not None:  # its template is the site's own
            return 0
        service = self.services.get(location.service) if location.service else None
        return nodes_asked(vars(service) if service else {}, self.template_map.get_command("", location.service))

    async def limit_of(self, location: ExecutionLocation) -> float:
        if isinstance(self._gate, GatedSSHConnector):  # its template is the site's own
            return 3600 * await self._gate.hours_of_a_job(get_inner_location(location))
        service = self.services.get(location.service) if location.service else None
        template = self.template_map.get_command("", location.service)
        return 3600 * hours_asked(vars(service) if service else {}, template)

    def template_of(self, location: ExecutionLocation) -> str:
        service = self.services.get(location.service) if location.service else None
        return f"{self.template_map.get_command('', location.service)}{vars(service) if service else ''!r}"

    def _beside(self, location: ExecutionLocation) -> ExecutionLocation:
        """The location with a service whose jobs have the name of those submitted ahead."""
        service = self.services.get(location.service) if location.service else None
        name: str | None = getattr(service, "jobName", None)
        if service is None or not name:
            return location
        beside, other = copy.copy(location), copy.copy(service)
        other.jobName = waiting_name(name)  # type: ignore[attr-defined]
        beside.service = f"{location.service}{SUFFIX}"
        self.services[beside.service] = other
        return beside


def jobs_of(settings: CoordinatorSettings) -> int:
    """Rounds in which each facility has a job: the final evaluation is one more."""
    return settings.rounds + bool(settings.final_evaluation)


def connector_for(scheduler: BatchScheduler) -> type[QueueManagerConnector]:
    """StreamFlow's connector of this scheduler with `AheadQueue`'s manners."""
    module, _, name = scheduler.connector.partition(":")
    original = getattr(importlib.import_module(module), name)
    return type(f"Patient{name}", (AheadQueue, original), {"behind": scheduler})
