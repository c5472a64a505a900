"""StreamFlow's PBS and Flux connectors, reading odd answers as what they are: no answer, or a job that is gone."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

from streamflow.core.deployment import ExecutionLocation
from streamflow.core.exception import WorkflowExecutionException
from streamflow.deployment.connector.queue_manager import FluxConnector, PBSConnector
from streamflow.log_handler import logger

from coordinator.streamflow_plugin.patient import PatientQueue, settled
from facility.exchange.messages.outcome import Outcome

SILENT = (
    "cannot connect to server",
    "connection refused",
    "communication failure",
    "end of file",
    "timed out",
    "unable to connect",
    "no route to host",
    "host is unreachable",
    "flux_open",
    "broker",
)


def is_silence(text: str) -> bool:
    """True when a PBS or Flux command failed because nobody answered, not because of what was asked."""
    return any(words in text.lower() for words in SILENT) and "unknown job" not in text.lower()


def pbs_jobs(text: str) -> dict[str, dict[str, Any]] | None:
    """`Jobs` of an answer of `qstat -xf -Fjson`, complaints around it left out; None when it is no answer."""
    start, end = text.find("{"), text.rfind("}")
    try:
        return dict(json.loads(text[start : end + 1]).get("Jobs", {}))
    except (ValueError, AttributeError, TypeError):
        return {} if "unknown job" in text.lower() else None


def pbs_running(text: str, ids: Iterable[str]) -> list[str] | None:
    """Those of `ids` that have not ended; None when it is no answer. A job that qstat does not know (its history is kept
    for a while, or not at all) has ended."""
    jobs = pbs_jobs(text)
    if jobs is None:
        return None
    return [one for one in ids if one in jobs and jobs[one].get("job_state") not in ("E", "F", "X", "C")]


class CarefulPBSConnector(PatientQueue, PBSConnector):
    """`type: pbs`, the same settings."""

    kind, title, cancelling = "pbs", "PBS", ("qdel",)
    is_silence = staticmethod(is_silence)

    async def _run_qstat_command(self, job_id: str, location: ExecutionLocation) -> str:
        text, _ = await self._ask(location, ["qstat", job_id, "-xf", "-Fjson"])
        job = (pbs_jobs(text) or {}).get(job_id, {})
        return json.dumps({"Jobs": {job_id: {"Output_Path": "", "Exit_status": int(Outcome.SKIPPED)} | job}})

    async def _get_running_jobs(self, location: ExecutionLocation) -> Collection[str]:
        if not self._scheduled_jobs:
            return []
        if "jobs" in self._jobs_cache:
            return self._jobs_cache["jobs"]
        text, _ = await self._ask(location, ["qstat", *self._scheduled_jobs, "-xf", "-Fjson"])
        found = pbs_running(text, self._scheduled_jobs)
        if found is None:
            raise WorkflowExecutionException(f"qstat at {self.deployment_name} failed: {text.strip()[-300:]}")
        self._jobs_cache["jobs"] = found
        return found

    async def _get_returncode(self, job_id: str, location: ExecutionLocation) -> int:
        code = await super()._get_returncode(job_id, location)
        return _told(self.deployment_name, job_id, code)


class CarefulFluxConnector(PatientQueue, FluxConnector):
    """`type: flux`, the same settings."""

    kind, title, cancelling = "flux", "Flux", ("flux", "cancel")
    is_silence = staticmethod(is_silence)

    async def _get_running_jobs(self, location: ExecutionLocation) -> Collection[str]:
        if "jobs" in self._jobs_cache:
            return self._jobs_cache["jobs"]
        text, code = await self._ask(location, ["flux", "jobs", "-n", "-f", "pending,running", "-o", "'{id}'"])
        if code:
            raise WorkflowExecutionException(f"flux jobs at {self.deployment_name} failed: {text.strip()[-300:]}")
        found = [line.strip() for line in text.splitlines() if line.strip() in self._scheduled_jobs]
        self._jobs_cache["jobs"] = found
        return found

    async def _get_output(self, job_id: str, location: ExecutionLocation) -> str:
        """The job's output itself (the original takes it for the name of a file)."""
        text, _ = await self._ask(location, ["flux", "job", "attach", job_id])
        return text.strip()

    async def _get_returncode(self, job_id: str, location: ExecutionLocation) -> int:
        text, _ = await self._ask(location, ["flux", "jobs", "-n", "-o", "'{returncode}'", job_id])
        words = text.split()
        code = int(words[-1]) if words and words[-1].lstrip("-").isdigit() else int(Outcome.CHECKPOINTED)
        return _told(self.deployment_name, job_id, code)


def _told(deployment: str, job_id: str, code: int) -> int:
    if settled(code) != code:
        logger.error(f"job {job_id} of {deployment} did not end well: exit code {code}")
    return settled(code)
