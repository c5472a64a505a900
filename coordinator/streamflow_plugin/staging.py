"""A facility's step contacts the facility within its own execution alone, and never while others wait for it.

StreamFlow makes a job's directories when it schedules a step and copies its inputs before it executes it, and asks for
the size of the directories afterwards, all of this with the login node of the facility. One that is away holds its step
up there, and with it a round that would have closed. Here scheduling gives a job its names and no more, inputs stay at
the coordinator, and `Staged` does the rest when the step executes, where a round need not wait for it
(`coordinator.streamflow_plugin.closing`).
"""

from __future__ import annotations

from typing import Any

from streamflow.core.data import DataType
from streamflow.core.scheduling import Hardware, HardwareRequirement
from streamflow.core.utils import get_entity_ids, get_job_tag
from streamflow.core.workflow import Job, Token
from streamflow.cwl.step import CWLTransferStep
from streamflow.data.remotepath import StreamFlowPath
from streamflow.deployment.utils import get_path_processor
from streamflow.workflow.step import ScheduleStep, _get_directory
from streamflow.workflow.token import JobToken

from coordinator.config.deployment_names import is_facility
from coordinator.events.event import failures_of
from coordinator.streamflow_plugin.patient import step_of


async def storage_usages(context: Any, location: Any, hardware: Any) -> dict[str, int]:
    """`remotepath.get_storage_usages`: what a job's directories hold decides nothing and is not asked for.

    StreamFlow adds it up for the whole run, links and what was removed long ago included, and takes it from what was
    free when the run began. Below 0 it schedules no further job: the sum of all models and updates of all rounds would
    have to fit. What a round needs of the disks is looked at by `crossfed check` and by the steps themselves.
    """
    return dict.fromkeys(hardware.storage, 0)


class AtOnce:
    """What a facility's job needs before it starts: no cores and no memory that others must free first.

    What a round waits for is a queue or nothing. A facility on this machine that had to wait for a core would be
    scheduled when others had ended, as the round closed, and would never begin.
    """

    def __init__(self, asked: HardwareRequirement | None) -> None:
        self.asked = asked

    def eval(self, job: Job) -> Hardware:
        storage = {} if self.asked is None else self.asked.eval(job).storage
        return Hardware(cores=0.0, memory=0.0, storage=dict(storage))


def schedule_at_once(original: Any) -> Any:
    """`ScheduleStep._schedule`: a facility's job gets its directories' names, at once; `Staged` makes them."""

    async def schedule(self: ScheduleStep, job: Job) -> None:
        if not all(is_facility(target.deployment.name) for target in self.binding_config.targets):
            with failures_of(step_of(job.name)):  # as in `facility_steps.making_directories`
                return await original(self, job=job)
        scheduler = self.workflow.context.scheduler
        await scheduler.schedule(job, self.binding_config, AtOnce(self.hardware_requirement))
        await hand_on(self, job)

    return schedule


async def hand_on(step: ScheduleStep, job: Job) -> None:
    """Give a job its directories' names, and let its step go on; nothing is made at the facility."""
    allocation = step.workflow.context.scheduler.get_allocation(job.name)
    paths = get_path_processor(allocation.locations[0])
    for name in ("input_directory", "output_directory", "tmp_directory"):
        setattr(job, name, _get_directory(paths, getattr(job, name), allocation.target))
    tokens: list[Token] = []
    for name in step.input_ports:
        tokens += [job.inputs[name]] if name in job.inputs else step.get_input_port(name).token_list
    token = JobToken(value=job, tag=get_job_tag(job.name))
    known = get_entity_ids([one for one in tokens if one.persistent_id])
    port = step.get_output_port()
    port.put(await step._persist_token(token=token, port=port, input_token_ids=known))


class Staged:
    """A facility's job whose directories and inputs are still to be made there."""

    def __init__(self, step: Any, job: Job, transfer: Any) -> None:
        """`transfer`: StreamFlow's own `CWLTransferStep.transfer`."""
        self.step, self._transfer = step, transfer
        self.job = Job(
            name=job.name,
            workflow_id=job.workflow_id,
            inputs=dict(job.inputs),
            input_directory=job.input_directory,
            output_directory=job.output_directory,
            tmp_directory=job.tmp_directory,
        )

    async def reach(self) -> None:
        """Make the directories there: the first commands that need the login. May be repeated."""
        context = self.step.workflow.context
        connector, locations = context.scheduler.get_connector(self.job.name), self.locations
        for one in layers(connector):
            if (again := getattr(one, "try_again", None)) is not None:
                again()
        await ScheduleStep._set_job_directories(self.step, connector, locations, self.job)
        for location in locations:
            for path in (self.job.input_directory, self.job.output_directory, self.job.tmp_directory):
                if not context.data_manager.get_data_locations(path, location.deployment, location.name):
                    context.data_manager.register_path(
                        location=location, path=path, relpath=path, data_type=DataType.PRIMARY
                    )

    async def inputs(self) -> None:
        """Copy files and directories there; everything else is as it was."""
        steps = self.step.workflow.steps
        for name, token in self.job.inputs.items():
            copying = steps.get(f"{self.step.name}/__transfer__/{name}")
            if isinstance(copying, CWLTransferStep):
                try:
                    self.job.inputs[name] = await self._transfer(copying, self.job, token)
                except BaseException:
                    self.step.workflow.context.data_manager.path_mapper.forget(self.job.input_directory)
                    raise

    @property
    def locations(self) -> Any:
        return self.step.workflow.context.scheduler.get_locations(self.job.name)

    async def holds(self, path: str) -> bool:
        """True if there is such a directory at the facility."""
        return bool(await StreamFlowPath(path, context=self.step.workflow.context, location=self.locations[0]).is_dir())

    async def settle(self, directory: str) -> None:
        """Wait for what an earlier run left at work there, as far as the connector can see."""
        connector = self.step.workflow.context.scheduler.get_connector(self.job.name)
        for one in layers(connector):
            if (settle := getattr(one, "settle", None)) is not None:
                return await settle(self.locations[0], directory)


def layers(connector: Any) -> list[Any]:
    """The connectors behind the engine's stand-in for one that is not deployed yet: a queue's and its host's."""
    found = []
    while connector is not None:
        connector = getattr(connector, "_connector", None) or connector
        found.append(connector)
        connector = vars(connector).get("connector")
    return found


def unmoved_token(token: Token) -> Token:
    """The token of an input that stays where it is until its job executes."""
    copy = token.update(token.value)
    copy.recoverable = False
    return copy
