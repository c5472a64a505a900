"""Restrict the output of a facility's step to one directory or nothing; all else that it writes is ignored.

StreamFlow 0.2.0rc3 takes any `cwl.output.json` in a job's directory for the step's outputs, and
copies files to the `basename` in it (docs/streamflow-output-path-traversal.md). Here the steps of facilities cannot
have such a file, their output is one directory of a fixed name, and whatever fails in fetching it is that facility's
absence: the receive step gets the reason, and the round goes on.
"""

from __future__ import annotations

import errno
import inspect
import logging
import sqlite3
from pathlib import Path
from typing import Any

from streamflow.core.exception import FailureHandlingException
from streamflow.core.utils import get_entity_ids, get_tag
from streamflow.core.workflow import CommandOutput, Job, Port, Status, Token
from streamflow.cwl import command as cwl_command
from streamflow.cwl import utils as cwl_utils
from streamflow.cwl.command import CWLCommand
from streamflow.cwl.processor import CWLCommandOutput
from streamflow.cwl.step import CWLExecuteStep, CWLTransferStep
from streamflow.cwl.token import CWLFileToken
from streamflow.cwl.utils import register_data
from streamflow.data import remotepath
from streamflow.data.manager import DefaultDataManager
from streamflow.data.remotepath import StreamFlowPath
from streamflow.log_handler import logger
from streamflow.workflow.step import ScheduleStep
from streamflow.workflow.utils import get_job_token

from coordinator.config.deployment_names import is_facility
from coordinator.events.event import failures_of, quote_for_display
from coordinator.rounds.late import LateJob
from coordinator.streamflow_plugin.closing import INPUT, Closing, closing_of_run
from coordinator.streamflow_plugin.copies import Copies, going_to
from coordinator.streamflow_plugin.errand import Errand
from coordinator.streamflow_plugin.lanes import TransferFailed
from coordinator.streamflow_plugin.last_words import words_of_error
from coordinator.streamflow_plugin.listings import PARAMETERS, without_listing
from coordinator.streamflow_plugin.overdue import note_failed
from coordinator.streamflow_plugin.patient import step_of
from coordinator.streamflow_plugin.problems import report_problem
from coordinator.streamflow_plugin.staging import Staged, hand_on, schedule_at_once, storage_usages, unmoved_token
from coordinator.streamflow_plugin.targets import check_target
from coordinator.streamflow_plugin.this_run import RoundAtFacility, this_round
from facility.exchange.messages.outcome import Outcome

COORDINATOR = "coordinator"
"""Deployment of the coordinator's own steps, as `crossfed render` names it."""
OUTPUT_FILE = "cwl.output.json"
OUTPUT = "update"
"""Name of the one directory that cwl/tools/train.cwl leaves, and of the port that it goes to."""
TRAIN = "train_"
"""Begins the name of a facility's training step."""
OUR_FAULT = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)
"""Errors of this machine: no facility's, so that they end the run as before."""


def ours(error: Exception) -> bool:
    """True for what ends the run, since it is not a facility's: this machine's disk, memory or database, an engine that
    ends. Whatever else the work for a facility raises (a scheduler that names no job, answers that make no sense or
    none for an hour) is that facility's absence."""
    known = isinstance(error, FailureHandlingException | sqlite3.Error | MemoryError)
    return known or isinstance(error, OSError) and error.errno in OUR_FAULT


UNSTAGED: dict[str, str] = {}
"""Jobs of facilities whose directories could not be made there, or whose inputs could not be copied, and why."""


class NoFile:
    """Stands for a file of a facility that is not looked at."""

    async def exists(self) -> bool:
        return False


def output_path(*parts: str, context: Any, location: Any) -> Any:
    """`StreamFlowPath` as `streamflow.cwl.command` calls it, which is for the output file alone."""
    if is_facility(location.deployment) and parts[-1] == OUTPUT_FILE:
        return NoFile()
    return StreamFlowPath(*parts, context=context, location=location)


def executing(original: Any, closing: Closing | None, copying: Any) -> Any:
    """`CWLCommand.execute`: a facility's job that fails has left no update, and what it wrote names no outputs.

    A job that its round does not wait for (`closing`) has left none either, for now. `copying`: StreamFlow's own
    `CWLTransferStep.transfer`.
    """

    async def execute(self: CWLCommand, job: Job) -> CommandOutput:
        context = self.step.workflow.context
        if not is_facility(context.scheduler.get_connector(job.name).deployment_name):
            return await original(self, job)
        workdir = Path(context.deployment_manager.config_map[COORDINATOR].workdir)
        this_round.set(round_of(job, workdir))
        absent = CWLCommandOutput(value=None, status=Status.COMPLETED, exit_code=int(Outcome.SKIPPED))
        if (reason := UNSTAGED.get(job.name)) is not None:
            return left_out(job, reason, absent)
        try:
            if closing is None:
                result = await original(self, job)
            else:
                closing.workdir = workdir
                staged = Staged(self.step, job, copying)
                result = await closing.run(job, errand_of(staged, lambda: original(self, staged.job)))
                if result is None:
                    return absent
        except Exception as error:
            if ours(error):
                raise
            return left_out(job, words_of_error(error), absent)
        if result.status is not Status.COMPLETED:
            logger.error(f"job {job.name} ended with code {result.exit_code}: the round goes on without its facility")
        # Nothing but the code is taken over, so that no other kind of output can name files either.
        code = result.exit_code if result.status is Status.COMPLETED else int(Outcome.SKIPPED)
        return CWLCommandOutput(value=None, status=Status.COMPLETED, exit_code=code)

    return execute


def left_out(job: Job, reason: str, absent: CommandOutput) -> CommandOutput:
    """Tell that a facility is absent from the round, and why."""
    _, facility = _kind_and_facility(job)
    said = quote_for_display(reason)
    report_problem(f"{facility} is left out of the round: {said}", logging.ERROR)
    note_failed(said)
    return absent


def making_directories(original: Any) -> Any:
    """`ScheduleStep._schedule`: a facility where the directories of a job cannot be made has no such job.

    A full disk there, no right to write, a login node that fails at everything: the step fails, and with it the run.
    Where it is a step of the coordinator's, the reason is reported: the engine may wait for it for ever.
    """

    async def schedule(self: ScheduleStep, job: Job) -> None:
        if not all(is_facility(target.deployment.name) for target in self.binding_config.targets):
            with failures_of(step_of(job.name)):
                return await original(self, job=job)
        try:
            return await original(self, job=job)
        except Exception as error:
            if ours(error) or self.workflow.context.scheduler.get_allocation(job.name) is None:
                raise
            UNSTAGED[job.name] = words_of_error(error)
        await hand_on(self, job)

    return schedule


def _kind_and_facility(job: Job) -> tuple[str, str]:
    """`train` and `a` of a job of the step `/rounds/train_a`."""
    kind, _, facility = step_of(job.name).rpartition("/")[2].partition("_")
    return kind, facility


def round_of(job: Job, workdir: Path) -> RoundAtFacility | None:
    """Which round of which facility a job is for; None for other steps than training."""
    kind, facility = _kind_and_facility(job)
    if f"{kind}_" != TRAIN or INPUT not in job.inputs:
        return None
    return RoundAtFacility(facility=facility, number=int(job.inputs[INPUT].value), workdir=workdir)


def errand_of(staged: Staged, execute: Any) -> Errand:
    """What `Closing` may do with a facility's job."""

    async def staged_and_executed() -> Any:
        await staged.inputs()
        return await execute()

    async def find(late: LateJob) -> Any | None:
        await staged.settle(late.directory)
        if not await staged.holds(f"{late.directory}/{OUTPUT}"):
            return None
        return CWLCommandOutput(value=None, status=Status.COMPLETED, exit_code=int(Outcome.DONE))

    return Errand(
        facility=step_of(staged.job.name).rpartition("/")[2].removeprefix(TRAIN),
        reach=staged.reach,
        execute=staged_and_executed,
        directory=lambda: staged.job.output_directory,
        find=find,
    )


def retrieving(original: Any, closing: Closing | None) -> Any:
    """`CWLExecuteStep._retrieve_output`: a facility's step yields the directory `OUTPUT` if it exists, else null."""

    async def retrieve(
        self: CWLExecuteStep, job: Job, output_name: str, output_port: Port, command_output: Any, connector: Any = None
    ) -> None:
        context = self.workflow.context
        if not is_facility(context.scheduler.get_connector(job.name).deployment_name):
            return await original(self, job, output_name, output_port, command_output, connector)
        await command_output
        token = Token(value=None, tag=get_tag(job.inputs.values()))
        try:
            if output_name == OUTPUT and job.name not in UNSTAGED:
                place = job.output_directory if closing is None else closing.directory(job)
                token = (await _directory(self, job, place) if place is not None else None) or token
        except Exception as error:
            logger.error(f"FAILED looking for what job {job.name} left: {error}")
        job_token = get_job_token(job.name, self.get_input_port("__job__").token_list)
        sources = get_entity_ids((*job.inputs.values(), job_token))
        output_port.put(await self._persist_token(token=token, port=output_port, input_token_ids=sources))
        await context.failure_manager.notify(output_port.name, token, job_token)

    return retrieve


async def _directory(step: CWLExecuteStep, job: Job, place: str) -> Token | None:
    """The token of the directory `OUTPUT` in `place`, at the facility of `job`; None without one."""
    context = step.workflow.context
    locations = context.scheduler.get_locations(job.name)
    path = f"{place}/{OUTPUT}"
    if not await StreamFlowPath(path, context=context, location=locations[0]).is_dir():
        return None
    value: Any = {"class": "Directory", "path": path, "location": f"file://{path}", "basename": OUTPUT}
    await register_data(
        context=context,
        connector=context.scheduler.get_connector(job.name),
        locations=locations,
        base_path=place,
        token_value=value,
    )
    return CWLFileToken(value=value, tag=get_tag(job.inputs.values()))


def transferring(original: Any, closing: Closing | None) -> Any:
    """`CWLTransferStep.transfer`: an update that cannot be fetched is null, with the reason in the log.

    Where rounds close (`closing`), what goes to a facility is copied when its job executes.
    """

    async def transfer(self: CWLTransferStep, job: Job, token: Token) -> Token:
        context = self.workflow.context
        here = context.scheduler.get_connector(job.name).deployment_name
        if is_facility(here) and (closing is not None or job.name in UNSTAGED):
            return unmoved_token(token)
        if is_facility(here):
            try:
                return await original(self, job, token)
            except Exception as error:
                if ours(error):
                    raise
                context.data_manager.path_mapper.forget(job.input_directory)
                UNSTAGED[job.name] = words_of_error(error)
                return unmoved_token(token)
        source = _source(context, token)
        if source is None:
            return await original(self, job, token)
        try:
            return await original(self, job, token)
        except Exception as error:
            if ours(error):
                raise
            logger.error(f"FAILED copy of the update of {source}, which is left out of the round: {error}")
            return Token(value=None, tag=token.tag)

    return transfer


def _source(context: Any, token: Token) -> str | None:
    """Deployment of the facility that a directory is to come from; None where it comes from no facility."""
    path = token.value.get("path") if isinstance(token.value, dict) else None
    found = context.data_manager.get_data_locations(path) if isinstance(path, str) else []
    return found[0].deployment if found and all(is_facility(one.deployment) for one in found) else None


class CarefulDataManager(DefaultDataManager):
    """`dataManager: default`; a facility's data is written only below the coordinator's working directory."""

    path_mapper: Copies

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.path_mapper = Copies(context)

    async def transfer_data(
        self, src_location: Any, src_path: str, dst_locations: Any, dst_path: str, writable: bool = False
    ) -> None:
        target = dst_locations[0]
        if is_facility(src_location.deployment) and target.deployment != src_location.deployment:
            if not target.local or is_facility(target.deployment):
                raise TransferFailed(f"nothing is sent from {src_location.deployment} to {target.deployment}")
            workdir = self.context.deployment_manager.config_map[target.deployment].workdir
            check_target(Path(dst_path), Path(workdir))
        with going_to(*dict.fromkeys(one.deployment for one in dst_locations)):
            await super().transfer_data(src_location, src_path, dst_locations, dst_path, writable)

    async def get_source_location(self, path: str, dst_deployment: str) -> Any:
        with going_to(dst_deployment):
            return await super().get_source_location(path, dst_deployment)

    def register_relation(self, src_location: Any, dst_location: Any) -> None:
        """Note that both locations hold the same data.

        StreamFlow also enters every earlier copy of it beside the new one: of a model that goes to hundreds of
        facilities and their steps, those are tens of thousands, which nothing looks for.
        """
        if is_facility(dst_location.deployment) and not is_facility(src_location.deployment):
            self.path_mapper.put_sent(src_location.path, dst_location)
        else:
            self.path_mapper.put(src_location.path, dst_location)
        self.path_mapper.put(dst_location.path, src_location)


def install() -> None:
    """Replace StreamFlow's own methods by these, once. Raises `RuntimeError` if StreamFlow's internals are unknown."""
    if getattr(cwl_command, "StreamFlowPath", None) is output_path:
        return
    source = inspect.getsource(CWLCommand.execute)
    known = (
        source.count("StreamFlowPath(") == 2
        and OUTPUT_FILE in source
        and list(inspect.signature(CWLExecuteStep._retrieve_output).parameters)
        == ["self", "job", "output_name", "output_port", "command_output", "connector"]
        and list(inspect.signature(CWLTransferStep.transfer).parameters) == ["self", "job", "token"]
        and list(inspect.signature(cwl_utils.update_file_token).parameters) == PARAMETERS
    )
    if not known:
        raise RuntimeError(
            "this StreamFlow is not 0.2.0rc3, and CrossFed cannot keep facilities' jobs from naming files to write: "
            "install streamflow==0.2.0rc3"
        )
    cwl_command.StreamFlowPath = output_path
    cwl_utils.update_file_token = without_listing(cwl_utils.update_file_token)
    closing = closing_of_run()
    remotepath.get_storage_usages = storage_usages
    make = schedule_at_once if closing is not None else making_directories
    ScheduleStep._schedule = make(ScheduleStep._schedule)
    CWLCommand.execute = executing(CWLCommand.execute, closing, CWLTransferStep.transfer)
    CWLExecuteStep._retrieve_output = retrieving(CWLExecuteStep._retrieve_output, closing)
    CWLTransferStep.transfer = transferring(CWLTransferStep.transfer, closing)
