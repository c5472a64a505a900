"""What every batch system's connector shares: patience with a silent server, and never two jobs of one name at a time."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import MutableSequence
from typing import ClassVar

from streamflow.core.deployment import ExecutionLocation
from streamflow.core.exception import WorkflowExecutionException
from streamflow.deployment.connector.queue_manager import QueueManagerConnector
from streamflow.log_handler import logger

from coordinator.engine.queues import SCHEDULERS, Job, read_jobs
from facility.exchange.messages.outcome import Outcome

PATIENCE_SECONDS = 3600.0
"""How long a server may be silent."""


def settled(code: int) -> int:
    """Code for the step: ours as they are, any other as `sits out`, since a step that fails ends the run for all."""
    return code if code in (Outcome.DONE, Outcome.SKIPPED) else int(Outcome.SKIPPED)


class PatientQueue(QueueManagerConnector):
    """Comes before StreamFlow's own connector in a class; the same settings."""

    kind: ClassVar[str]
    """Key of `SCHEDULERS`."""
    title: ClassVar[str]
    cancelling: ClassVar[tuple[str, ...]]
    """Command that cancels the job ids after it."""

    @staticmethod
    def is_silence(text: str) -> bool:
        """True when a command failed because nobody answered, not because of what was asked."""
        raise NotImplementedError

    async def _ask(self, location: ExecutionLocation, command: MutableSequence[str]) -> tuple[str, int]:
        """Run one of the scheduler's commands at the login node; wait while nobody answers."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_SECONDS
        told = False
        while True:
            answer = await self.run(location=location, command=command, capture_output=True)
            text, code = answer if answer is not None else ("", 1)
            if code == 0 or not self.is_silence(text):
                if told:
                    logger.info(f"{self.title} of {self.deployment_name} answers again")
                return text, code
            if loop.time() > deadline:
                raise WorkflowExecutionException(
                    f"{self.title} of {self.deployment_name} did not answer for {PATIENCE_SECONDS / 60:g} minutes: {text.strip()}"
                )
            if not told:
                logger.warning(
                    f"{self.title} of {self.deployment_name} does not answer ({text.strip()[-200:]}); waiting"
                )
                told = True
            await asyncio.sleep(self.pollingInterval)

    async def _run_batch_command(
        self, command: str, environment, job_name: str, location: ExecutionLocation, **rest
    ) -> str:
        name = self._name(location)
        if name:
            await self._make_way(name, location)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_SECONDS
        while True:
            try:
                return await super()._run_batch_command(
                    command=command, environment=environment, job_name=job_name, location=location, **rest
                )
            except WorkflowExecutionException as error:
                if not self.is_silence(str(error)) or loop.time() > deadline:
                    raise
                logger.warning(
                    f"{self.title} of {self.deployment_name} takes no job now ({str(error)[-200:]}); trying again"
                )
                await asyncio.sleep(self.pollingInterval)
                if name and (jobs := await self._jobs_named(name, location)):
                    logger.info(f"the job was taken all the same: {jobs[0].id}")
                    return jobs[0].id

    def _name(self, location: ExecutionLocation) -> str | None:
        """The job name that federation.yml's rendering gives this facility."""
        service = self.services.get(location.service) if location.service else None
        return getattr(service, "jobName", None)

    async def _jobs_named(self, name: str, location: ExecutionLocation) -> list[Job]:
        """Our jobs of this name that are still in the queue."""
        command = SCHEDULERS[self.kind].listing.replace("NAME", shlex.quote(name))
        text, code = await self._ask(location, [command])
        if code:
            raise WorkflowExecutionException(f"listing jobs at {self.deployment_name} failed: {text.strip()}")
        return read_jobs(self.kind, text)

    async def _make_way(self, name: str, location: ExecutionLocation) -> None:
        """Deal with jobs that an earlier run left: cancel those that wait, wait for those that run.

        A job that runs to its end leaves a finished update at the facility, which the next job then returns at once.
        """
        told: set[str] = set()
        while jobs := await self._jobs_named(name, location):
            for job in jobs:
                if not job.began:
                    logger.info(f"cancelling job {job.id} ({name}), which an earlier run left waiting")
                    await self._ask(location, [*self.cancelling, job.id])
                elif job.id not in told:
                    logger.info(f"job {job.id} ({name}) of an earlier run is {job.state.lower()}: waiting for its end")
                    told.add(job.id)
            await asyncio.sleep(min(self.pollingInterval, 5))

    async def _remove_jobs(self, location: ExecutionLocation, jobs: MutableSequence[str]) -> None:
        """Cancel jobs at the end of a run; `location` is the login node's (the original looks inside it and fails)."""
        await self.connector.run(location=location, command=[*self.cancelling, *jobs])
