"""StreamFlow's Slurm connector, asking again where the original takes silence for an answer.

- A job is gone only when squeue says so; while slurmctld does not answer, we wait.
- A job is submitted once: one of the same name that runs is waited for, one that waits is cancelled.
- A job that was cancelled, ran out of time or failed ends as `sits out`, with what Slurm says in the log.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Collection, MutableSequence

from streamflow.core.deployment import ExecutionLocation
from streamflow.core.exception import WorkflowExecutionException
from streamflow.deployment.connector.queue_manager import SlurmConnector
from streamflow.log_handler import logger

from facility.exchange.outcome import Outcome

PATIENCE_SECONDS = 3600.0
"""How long a controller may be silent."""
SILENT = (
    "unable to contact slurm controller",
    "socket timed out",
    "connection refused",
    "zero bytes were transmitted",
    "controller is not responding",
    "slurm backup controller in standby",
    "connect failure",
    "slurm_load_jobs error",
)
UNKNOWN = "invalid job id"


def is_silence(text: str) -> bool:
    """True when a Slurm command failed because nobody answered, not because of what was asked."""
    return any(words in text.lower() for words in SILENT) and UNKNOWN not in text.lower()


def running(text: str, code: int) -> list[str] | None:
    """Job ids of squeue's answer; None when it is no answer. Slurm forgets ended jobs and then calls the id invalid."""
    if code == 0:
        return [line.strip() for line in text.splitlines() if line.strip().isdigit()]
    return [] if UNKNOWN in text.lower() else None


def verdict(state: str, exit_code: str) -> tuple[int, str]:
    """Code for the step, and a sentence when the job did not end well. `exit_code` is Slurm's `code:signal`."""
    code, _, number = exit_code.partition(":")
    if state == "COMPLETED" and code == "0":
        return 0, ""
    if state == "FAILED" and code == str(int(Outcome.SITS_OUT)):
        return int(Outcome.SITS_OUT), ""
    how = f"{state}, exit code {code}" + (f", signal {number}" if number not in ("", "0") else "")
    return int(Outcome.SITS_OUT), how


class CarefulSlurmConnector(SlurmConnector):
    """`type: slurm`, the same settings."""

    async def _ask(self, location: ExecutionLocation, command: MutableSequence[str]) -> tuple[str, int]:
        """Run a Slurm command at the login node; wait while nobody answers."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_SECONDS
        told = False
        while True:
            answer = await self.run(location=location, command=command, capture_output=True)
            text, code = answer if answer is not None else ("", 1)
            if code == 0 or not is_silence(text):
                if told:
                    logger.info(f"Slurm of {self.deployment_name} answers again")
                return text, code
            if loop.time() > deadline:
                raise WorkflowExecutionException(
                    f"Slurm of {self.deployment_name} did not answer for {PATIENCE_SECONDS / 60:g} minutes: {text.strip()}"
                )
            if not told:
                logger.warning(f"Slurm of {self.deployment_name} does not answer ({text.strip()[-200:]}); waiting")
                told = True
            await asyncio.sleep(self.pollingInterval)

    async def _get_running_jobs(self, location: ExecutionLocation) -> Collection[str]:
        if not self._scheduled_jobs:
            return []
        if "jobs" in self._jobs_cache:
            return self._jobs_cache["jobs"]
        ids = ",".join(self._scheduled_jobs)
        states = "PENDING,RUNNING,SUSPENDED,COMPLETING,CONFIGURING,RESIZING,REVOKED,SPECIAL_EXIT,REQUEUED,STAGE_OUT"
        text, code = await self._ask(location, ["squeue", "-h", "-j", ids, "-t", states, "-o", "%i"])
        found = running(text, code)
        if found is None:
            raise WorkflowExecutionException(f"squeue at {self.deployment_name} failed: {text.strip()}")
        self._jobs_cache["jobs"] = found
        return found

    async def _get_returncode(self, job_id: str, location: ExecutionLocation) -> int:
        text, code = await self._ask(location, ["scontrol", "show", "-o", "job", job_id])
        fields = dict(word.split("=", 1) for word in text.split() if "=" in word)
        if code or "JobState" not in fields:
            logger.error(
                f"job {job_id} of {self.deployment_name} is no longer known to Slurm ({text.strip()[-200:]}); it counts as ended"
            )
            return int(Outcome.SITS_OUT)
        result, sentence = verdict(fields["JobState"], fields.get("ExitCode", "0:0"))
        if sentence:
            logger.error(
                f"job {job_id} of {self.deployment_name} did not end well: {sentence}; its output is {fields.get('StdOut', '?')}"
            )
        return result

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
                if not is_silence(str(error)) or loop.time() > deadline:
                    raise
                logger.warning(f"Slurm of {self.deployment_name} takes no job now ({str(error)[-200:]}); trying again")
                await asyncio.sleep(self.pollingInterval)
                if name and (jobs := await self._jobs_named(name, location)):
                    logger.info(f"the job was taken all the same: {jobs[0][0]}")
                    return jobs[0][0]

    def _name(self, location: ExecutionLocation) -> str | None:
        """The job name that federation.yml's rendering gives this facility."""
        service = self.services.get(location.service) if location.service else None
        return getattr(service, "jobName", None)

    async def _jobs_named(self, name: str, location: ExecutionLocation) -> list[tuple[str, str]]:
        """Id and state of our jobs of this name that are still in the queue."""
        command = ["squeue", "-h", "-u", '"$(id -un)"', "-n", shlex.quote(name), "-o", "'%i %T'"]
        text, code = await self._ask(location, command)
        if code:
            raise WorkflowExecutionException(f"squeue at {self.deployment_name} failed: {text.strip()}")
        return [(line.split()[0], line.split()[1]) for line in text.splitlines() if len(line.split()) == 2]

    async def _make_way(self, name: str, location: ExecutionLocation) -> None:
        """Deal with jobs that an earlier run left: cancel those that wait, wait for those that run.

        A job that runs to its end leaves a finished update at the facility, which the next job then returns at once.
        """
        told: set[str] = set()
        while jobs := await self._jobs_named(name, location):
            for job, state in jobs:
                if state in ("PENDING", "SUSPENDED", "REQUEUED", "SPECIAL_EXIT"):
                    logger.info(f"cancelling job {job} ({name}), which an earlier run left waiting")
                    await self._ask(location, ["scancel", job])
                elif job not in told:
                    logger.info(f"job {job} ({name}) of an earlier run is {state.lower()}: waiting for its end")
                    told.add(job)
            await asyncio.sleep(min(self.pollingInterval, 5))

    async def _remove_jobs(self, location: ExecutionLocation, jobs: MutableSequence[str]) -> None:
        """Cancel jobs at the end of a run; `location` is the login node's (the original looks inside it and fails)."""
        await self.connector.run(location=location, command=["scancel", *jobs])
