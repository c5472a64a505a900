"""A queue connector that is patient with a silent scheduler, and never has two jobs of one name at a time.

- A job has ended only when its scheduler says so (`coordinator.schedulers.scheduler`); anything else is asked again.
- A job is submitted once: one of the same name that runs is waited for, one that waits is cancelled.
- A job that runs far beyond its time limit, or waits without end, as its scheduler says, is cancelled and taken for
  lost (`coordinator.streamflow_plugin.overdue`).
- A job that was not taken, was cancelled, ran out of time or failed ends as `skipped`, with the scheduler's words in
  the log and as an event: its facility is absent from the round, and no other is held up.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Callable, Collection, MutableSequence
from contextvars import ContextVar
from functools import cached_property
from typing import Any, ClassVar, TypeVar, cast

from streamflow.core.deployment import ExecutionLocation
from streamflow.core.exception import WorkflowExecutionException
from streamflow.deployment.connector.queue_manager import QueueManagerConnector
from streamflow.deployment.wrapper import get_inner_location
from streamflow.log_handler import logger

from coordinator.archive.audit import VARIABLE as LOG
from coordinator.config.deployment_names import facility_of_deployment
from coordinator.events.event import VARIABLE, emit, quote_for_display
from coordinator.schedulers.gated import Gated
from coordinator.schedulers.scheduler import ANSWER_BYTES, FORGOTTEN, NOT_TAKEN, OVERDUE, BatchScheduler, Ending, Job
from coordinator.streamflow_plugin.bounded_reader import AnswerTooLong
from coordinator.streamflow_plugin.finishing import Finishing
from coordinator.streamflow_plugin.job_progress import JobWatch, command_runner, look_interval
from coordinator.streamflow_plugin.last_words import error_in
from coordinator.streamflow_plugin.names import DATABASE
from coordinator.streamflow_plugin.overdue import MOST_JOBS, Overdue, forget_lost, give_up, note_failed, note_lost
from coordinator.streamflow_plugin.problems import report_problem
from facility.exchange.exit_codes import BROKE

PATIENCE_SECONDS = 3600.0
"""How long a scheduler may be silent."""
HELD_UP_SECONDS = 60.0
"""A question that took longer waited for the connection or the login."""
REFUSED = "refused-"
"""Begins the id of a job that the scheduler, or the facility's gate, did not take."""

T = TypeVar("T")
may_be_repeated: ContextVar[bool] = ContextVar("may_be_repeated", default=True)
"""True where a command whose answer was lost may be given again; not a submission: the job may be in the queue."""


class ConnectionBroke(WorkflowExecutionException):
    """The connection to a login node ended before a command's answer came: whether it ran is not known."""


class PatientQueue(QueueManagerConnector):
    """Comes before StreamFlow's own connector in a class; the same settings."""

    behind: ClassVar[BatchScheduler]
    """The facility's scheduler, be it behind a gate or not."""
    _endings: dict[str, Ending]

    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, **settings)
        self._endings = {}
        self._outputs: dict[str, str] = {}
        self._errors: dict[str, str] = {}
        """By job: the error that its output ends with."""
        self._silent_since: dict[str, float] = {}
        self._held_up = 0.0
        self._steps: dict[str, str] = {}
        """Step by job."""
        self._begun: set[str] = set()
        self._finishing = Finishing()
        self._watches: dict[str, JobWatch] = {}

    @cached_property
    def _overdue(self) -> Overdue:
        return Overdue(self)

    @property
    def _gate(self) -> Any:
        """The connector that answers requests in place of a shell: of a facility's gate, or of FirecREST; else None.

        Until it is deployed, the engine has a stand-in.
        """
        connector: Any = getattr(self.connector, "_connector", None) or self.connector
        return connector if hasattr(connector, "submit_job") else None

    @property
    def scheduler(self) -> BatchScheduler:
        return self.behind if self._gate is None else cast(BatchScheduler, Gated(self.behind))

    async def _shell(self, location: ExecutionLocation, line: str) -> tuple[str, int]:
        """Run a shell line at the login node; returns all that it printed, and its code: `BROKE`, which no scheduler
        gives, for an answer that was lost, or is too long to be a scheduler's."""
        start = asyncio.get_running_loop().time()
        try:
            answer = await self.run(location=location, command=[self.scheduler.line(line)], capture_output=True)
        except (ConnectionBroke, AnswerTooLong) as error:
            answer = str(error), BROKE
        if answer is not None and len(answer[0]) > ANSWER_BYTES:  # reading it would hold up all facilities
            answer = f"{self.scheduler.title} answered with more than {ANSWER_BYTES} bytes", BROKE
        if (took := asyncio.get_running_loop().time() - start) > HELD_UP_SECONDS:
            self._held_up += took
        return answer if answer is not None else ("", 1)

    def _now(self) -> float:
        """Seconds, without those in which the login node could not be asked: they are not the scheduler's silence."""
        return asyncio.get_running_loop().time() - self._held_up

    async def _ask(self, location: ExecutionLocation, command: str, read: Callable[[str, int], T | None]) -> T:
        """Run a scheduler's command at the login node until `read` finds an answer; it returns None for silence."""
        deadline = self._now() + PATIENCE_SECONDS
        reported = False
        subject = f"{self.scheduler.title} of {self.deployment_name}"
        while True:
            text, code = await self._shell(location, command)
            if (found := read(text, code)) is not None:
                if reported:
                    report_problem(f"{subject} answers again", logging.INFO)
                return found
            said = f"code {code}: {text.strip()[-200:]}"
            if self._now() > deadline:
                raise WorkflowExecutionException(
                    f"{subject} did not answer `{command}` for {PATIENCE_SECONDS / 60:g} minutes, last with {said}"
                )
            if not reported:
                report_problem(f"{subject} does not answer ({said}); waiting")
                reported = True
            await asyncio.sleep(self.pollingInterval)

    async def _states(self, ids: list[str], location: ExecutionLocation) -> dict[str, str]:
        """States of the jobs that the scheduler lists; one query, since a missing job must not delay the others."""
        scheduler = self.scheduler

        async def once(asked: list[str]) -> dict[str, str]:
            text, code = await self._shell(location, scheduler.query(asked))
            return scheduler.read_states(text, code, asked)

        states = await once(ids)
        for missing in [one for one in ids if one not in states and len(ids) > 1]:
            states |= await once([missing])
        return states

    async def _get_running_jobs(self, location: ExecutionLocation) -> Collection[str]:
        ids = [one for one in self._scheduled_jobs if not one.startswith(REFUSED) and one not in self._endings]
        if not ids:
            return []
        if "jobs" in self._jobs_cache:
            return self._jobs_cache["jobs"]
        asked = self._overdue.now()
        states = await self._states(ids, location)
        self._note_begins(states)
        self._finishing.see(states, self._now(), self.scheduler, self.deployment_name)
        self._overdue.see(states, asked)
        silent = self._note_silence([one for one in ids if one not in states])
        ended = [*self.scheduler.ended(states, ids), *await self._lost(states.keys(), silent, location)]
        self._jobs_cache["jobs"] = found = [one for one in ids if one not in ended]
        return found

    def _note_begins(self, states: dict[str, str]) -> None:
        """Report each job that has left the queue, and each that waits there again: it was requeued or preempted."""
        for one, state in states.items():
            begins = one not in self._begun and self.scheduler.has_begun(state) and state != FORGOTTEN
            if begins or (one in self._begun and self.scheduler.waits(state)):
                self._begun ^= {one}
                emit("began" if begins else "requeued", step=self._steps.get(one, ""), job=one)

    async def _lost(self, jobs: Collection[str], silent: Collection[str], location: ExecutionLocation) -> list[str]:
        """The `jobs` that are overdue, and those that the scheduler was `silent` about for too long.

        They are cancelled, and have ended as far as their round is concerned.
        """
        for one in silent:
            await self._overdue.cancel(one, self._scheduled_jobs.get(one, location))
            said = f"{self.scheduler.title} has said nothing of it for {PATIENCE_SECONDS / 60:g} minutes"
            self._endings[one] = Ending(state=OVERDUE, code=None, detail=said)
        for one in jobs:
            if (ending := await self._overdue.ending(one, self._scheduled_jobs.get(one, location))) is not None:
                self._endings[one] = ending
        return [one for one in (*jobs, *silent) if one in self._endings]

    async def shell_line(self, location: ExecutionLocation, line: str) -> tuple[str, int]:
        return await self._shell(location, line)

    async def limit_of(self, location: ExecutionLocation) -> float:
        """Seconds that a job may run, as it asks for; 0 where nothing says."""
        return 0.0

    def _watch(self, job_id: str, directory: str | None, location: ExecutionLocation) -> None:
        """Begin to follow a job's progress, if it is shown."""
        if not (seconds := look_interval()) or not directory:
            return
        ask = command_runner(self, location)
        watch = JobWatch(step=self._steps[job_id], directory=directory, ask=ask)

        async def estimate() -> None:
            if line := self.scheduler.query_begin(job_id):
                text, code = await self._shell(location, line)
                begins = self.scheduler.read_begin(text) if code == 0 else ""
                emit("estimated", step=self._steps[job_id], job=job_id, begins=begins)

        watch.waits, watch.estimate = lambda: job_id not in self._begun, estimate
        self._watches[job_id] = watch.begin(seconds)

    def _note_silence(self, silent: list[str]) -> list[str]:
        """Report a scheduler that says nothing of jobs, once; returns those without news for too long."""
        now, since = self._now(), self._silent_since
        for gone in since.keys() - set(silent):
            del since[gone]
            report_problem(
                f"{self.scheduler.title} of {self.deployment_name} answers again for job {gone}", logging.INFO
            )
        for one in silent:
            if one not in since:
                since[one] = now
                report_problem(f"{self.scheduler.title} of {self.deployment_name} says nothing of job {one}; waiting")
        lost = [one for one in silent if now - since[one] > PATIENCE_SECONDS]
        for one in lost:
            del since[one]
        return lost

    async def _ending(self, job_id: str, location: ExecutionLocation) -> Ending:
        if job_id not in self._endings:
            scheduler = self.scheduler
            self._endings[job_id] = await self._ask(
                location, scheduler.query_ending(job_id), lambda text, code: scheduler.read_ending(text, code, job_id)
            )
        return self._endings[job_id]

    async def _get_output(self, job_id: str, location: ExecutionLocation) -> str:
        """The end of what the job printed, where its file is known."""
        path = self._outputs.pop(job_id, "") or (await self._ending(job_id, location)).output
        if not path:
            return ""
        try:
            text, code = await self._shell(location, self.scheduler.end_of_output(job_id, path))
        except WorkflowExecutionException:  # a gate that keeps what jobs print
            return ""
        self._errors[job_id] = error_in(text) if code == 0 else ""
        return text.strip() if code == 0 else ""

    async def _get_returncode(self, job_id: str, location: ExecutionLocation) -> int:
        if (watch := self._watches.pop(job_id, None)) is not None:
            watch.end()
        ending = await self._ending(job_id, location)
        emit("ended", step=self._steps.get(job_id, ""), job=job_id, code=ending.step_code, problem=ending.problem)
        if ending.problem:
            said = self._errors.pop(job_id, "")
            whose = "the job" if job_id.startswith(REFUSED) else f"job {job_id}"
            sentence = f"{whose} of {self.deployment_name} {ending.problem}" + (f": {said}" if said else "")
            report_problem(sentence, logging.ERROR)
            (note_lost if ending.state == OVERDUE else note_failed)(sentence)
        return ending.step_code

    async def _run_batch_command(
        self, command: str, environment, job_name: str, location: ExecutionLocation, workdir=None, **rest
    ) -> str:
        name, step = self._name(location), step_of(job_name)
        emit("executing", step=step)
        forget_lost()
        if name:
            await self._make_way(name, location)
        job_id = await self._put(command, environment, job_name, location, workdir, **rest)
        self._steps[job_id] = step
        if not job_id.startswith(REFUSED):
            emit("submitted", step=step, job=job_id)
            self._watch(job_id, workdir, location)
        return job_id

    async def _put(
        self, command: str, environment, job_name: str, location: ExecutionLocation, workdir=None, **rest
    ) -> str:
        """Submit once, however often it takes to be heard; returns the job's id."""
        name, output = self._name(location), ""
        if self.scheduler.output_file and workdir and rest.get("stdout") == asyncio.subprocess.STDOUT:
            output = f"{workdir}/{self.scheduler.output_file}"
            rest |= {"stdout": output, "stderr": output}
        deadline = self._now() + PATIENCE_SECONDS
        while True:
            try:
                text = await self._submit(command, environment, job_name, location, workdir, **rest)
            except WorkflowExecutionException as error:
                silence = isinstance(error, ConnectionBroke) or self.scheduler.is_silence(str(error))
                if not silence:
                    return self._not_taken(job_name, str(error))
                if self._now() > deadline:
                    raise
                report_problem(
                    f"{self.scheduler.title} of {self.deployment_name} takes no job now ({str(error)[-200:]}); "
                    "trying again"
                )
                await asyncio.sleep(self.pollingInterval)
                there = await self._jobs_named(name, location) if name else []
                if not (jobs := [one for one in there if one.id not in self._steps]):
                    continue
                logger.info(f"the job was taken all the same: {jobs[0].id}")
                text = jobs[0].id
            if text.startswith(REFUSED):
                return text
            if not (job_id := self.scheduler.read_id(text)):
                raise WorkflowExecutionException(
                    f"{self.scheduler.program} at {self.deployment_name} named no job: {text.strip()[-300:]!r}"
                )
            self._outputs[job_id] = output
            return job_id

    async def _submit(self, command: str, environment, job_name: str, location, workdir, **rest) -> str:
        """What the submission printed; at a gate that refuses, the id of a job that was not taken."""
        if self._gate is None:
            # A queue on this machine would hand the coordinator's own environment to the job.
            environment = (environment or {}) | dict.fromkeys((VARIABLE, LOG, DATABASE), "''")
            once = may_be_repeated.set(False)
            try:
                return await super()._run_batch_command(
                    command=command,
                    environment=environment,
                    job_name=job_name,
                    location=location,
                    workdir=workdir,
                    **rest,
                )
            finally:
                may_be_repeated.reset(once)
        try:
            stdout = rest.get("stdout")
            return await self._gate.submit_job(
                get_inner_location(location),
                command,
                name=self._name(location) or "",
                workdir=workdir or "",
                output=stdout if isinstance(stdout, str) else "",
            )
        except self._gate.refused as error:
            return self._not_taken(job_name, str(error))

    def _not_taken(self, job_name: str, why: str) -> str:
        """The id of a job that has ended before it was in a queue."""
        refused = f"{REFUSED}{len(self._endings)}-{abs(hash(job_name))}"
        said = " ".join(why.removeprefix(f"Error submitting job {job_name} to ").split())
        self._endings[refused] = Ending(state=NOT_TAKEN, code=None, detail=quote_for_display(said))
        return refused

    def _name(self, location: ExecutionLocation) -> str | None:
        """The job name that federation.yml's rendering gives this facility."""
        service = self.services.get(location.service) if location.service else None
        return getattr(service, "jobName", None)

    async def _jobs_named(self, name: str, location: ExecutionLocation) -> list[Job]:
        """Our jobs of this name that are still in the queue."""
        scheduler = self.scheduler
        return await self._ask(
            location,
            scheduler.listing(shlex.quote(name)),
            lambda text, code: scheduler.read_listing(text) if scheduler.is_answer(text, code) else None,
        )

    async def _make_way(self, name: str, location: ExecutionLocation, spare: str = "") -> None:
        """Deal with jobs that an earlier run left: cancel those that wait, wait for those that run.

        A job that runs to its end leaves a finished update at the facility, which the next job then returns at once.
        `spare`: a job that is left alone. Raises where a job that was cancelled stays in the queue.
        """
        reported: set[str] = set()
        looked: dict[str, float] = {}
        asked = self._overdue.now()
        there: set[str] = set()
        while jobs := [
            one
            for one in await self._jobs_named(name, location)
            if one.id != spare and one.state not in self.scheduler.terminal
        ]:
            if len(there := there.union(job.id for job in jobs)) > MOST_JOBS:
                give_up(f"{self.scheduler.title} of {self.deployment_name} lists ever new jobs of the name {name}")
            self._overdue.see({job.id: job.state for job in jobs}, asked)
            await self._overdue.make_way(jobs, location, looked)
            for job in jobs:
                if job.began and job.id not in reported:
                    logger.info(f"job {job.id} ({name}) of an earlier run has begun ({job.state}): waiting for its end")
                    emit("earlier", facility=facility_of_deployment(self.deployment_name), job=job.id)
                    reported.add(job.id)
            await asyncio.sleep(min(self.pollingInterval, 5))
            asked = self._overdue.now()

    async def settle(self, location: ExecutionLocation, directory: str) -> None:
        """Wait for the end of jobs that an earlier run left running; those that wait in the queue are cancelled."""
        if name := self._name(location):
            await self._make_way(name, location)

    async def _remove_jobs(self, location: ExecutionLocation, jobs: MutableSequence[str]) -> None:
        """Cancel jobs at the end of a run; `location` is the login node's (the original looks inside it and fails)."""
        if there := [one for one in jobs if not one.startswith(REFUSED)]:
            await self.connector.run(location=location, command=[self.scheduler.cancel_ids(there)])


def step_of(job_name: str) -> str:
    """`/rounds/train_a` of StreamFlow's job name `/rounds/train_a/0.1`."""
    return job_name.rpartition("/")[0]
