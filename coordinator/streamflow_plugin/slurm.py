"""StreamFlow's Slurm connector, asking again where the original takes silence for an answer.

- A job is gone only when squeue says so; while slurmctld does not answer, we wait.
- A job is submitted once: one of the same name that runs is waited for, one that waits is cancelled.
- A job that was cancelled, ran out of time or failed ends as `sits out`, with what Slurm says in the log.
"""

from __future__ import annotations

from collections.abc import Collection

from streamflow.core.deployment import ExecutionLocation
from streamflow.core.exception import WorkflowExecutionException
from streamflow.deployment.connector.queue_manager import SlurmConnector
from streamflow.log_handler import logger

from coordinator.streamflow_plugin.patient import PatientQueue
from facility.exchange.messages.outcome import Outcome

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
    if state == "FAILED" and code == str(int(Outcome.SKIPPED)):
        return int(Outcome.SKIPPED), ""
    how = f"{state}, exit code {code}" + (f", signal {number}" if number not in ("", "0") else "")
    return int(Outcome.SKIPPED), how


class CarefulSlurmConnector(PatientQueue, SlurmConnector):
    """`type: slurm`, the same settings."""

    kind, title, cancelling = "slurm", "Slurm", ("scancel",)
    is_silence = staticmethod(is_silence)

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
            return int(Outcome.SKIPPED)
        result, sentence = verdict(fields["JobState"], fields.get("ExitCode", "0:0"))
        if sentence:
            logger.error(
                f"job {job_id} of {self.deployment_name} did not end well: {sentence}; its output is {fields.get('StdOut', '?')}"
            )
        return result
