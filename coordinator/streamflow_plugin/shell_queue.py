"""A queue connector for any scheduler that StreamFlow has none for: its module gives the shell lines.

`PatientQueue` asks, cancels and reads endings; what is left is submission: the job's script on the standard input of
`scheduler.submission(...)`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
from collections.abc import Collection, MutableMapping, MutableSequence
from importlib.resources import files
from typing import Any

from streamflow.core.deployment import ExecutionLocation
from streamflow.core.exception import WorkflowExecutionException
from streamflow.deployment.connector.queue_manager import QueueManagerConnector, QueueManagerService

from coordinator.schedulers.scheduler import BatchScheduler


class ShellService(QueueManagerService):
    """One entry of `services`: a template and the jobs' name; limits are the template's directives."""

    def __init__(self, file: str | None = None, jobName: str | None = None) -> None:
        super().__init__(file)
        self.jobName = jobName


class ShellQueue(QueueManagerConnector):
    scheduler: BatchScheduler

    @classmethod
    def get_schema(cls) -> str:
        """The schema of StreamFlow's Flux connector, with nothing but a file and a name in its services."""
        package = files("streamflow.deployment.connector")
        schema = json.loads(package.joinpath("schemas").joinpath("flux.json").read_text("utf-8"))
        texts = {"file": {"type": "string"}, "jobName": {"type": "string"}}
        schema["$defs"]["service"] |= {"title": "ShellService", "properties": texts, "additionalProperties": False}
        schema["$id"] = schema["$id"].replace("flux.json", "shell_queue.json")
        return json.dumps(schema)

    @property
    def _service_class(self) -> type[QueueManagerService]:
        return ShellService

    async def _run_batch_command(
        self,
        command: str,
        environment: MutableMapping[str, str] | None,
        job_name: str,
        location: ExecutionLocation,
        workdir: str | None = None,
        stdin: int | str | None = None,
        stdout: int | str = asyncio.subprocess.STDOUT,
        stderr: int | str = asyncio.subprocess.STDOUT,
        timeout: int | None = None,
    ) -> str:
        service: Any = self.services.get(location.service) if location.service else None
        name = getattr(service, "jobName", None) or "crossfed"
        output = stdout if isinstance(stdout, str) else "/dev/null"
        packed = base64.b64encode(command.encode()).decode()
        variables = " ".join(f"{key}={shlex.quote(value)}" for key, value in (environment or {}).items())
        place = f"cd {shlex.quote(workdir)} && " if workdir else ""
        line = f"{place}echo {packed} | base64 -d | {variables} {self.scheduler.submission(name, output)}"
        answer = await self.run(location=location, command=[f"{{ {line}; }} 2>&1"], capture_output=True)
        text, code = answer if answer is not None else ("", 1)
        if code:
            raise WorkflowExecutionException(
                f"Error submitting job {job_name} to {self.scheduler.title}: {text.strip()}"
            )
        return text.strip()

    async def _get_output(self, job_id: str, location: ExecutionLocation) -> str:
        raise NotImplementedError

    async def _get_returncode(self, job_id: str, location: ExecutionLocation) -> int:
        raise NotImplementedError

    async def _get_running_jobs(self, location: ExecutionLocation) -> Collection[str]:
        raise NotImplementedError

    async def _remove_jobs(self, location: ExecutionLocation, jobs: MutableSequence[str]) -> None:
        raise NotImplementedError
