"""StreamFlow's local connector, which reports its commands and the coordinator's failed steps to the supervisor."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from collections.abc import MutableSequence
from pathlib import Path
from typing import Any

from streamflow.core.deployment import ExecutionLocation
from streamflow.core.scheduling import Hardware
from streamflow.deployment.connector.local import LocalConnector

from coordinator.archive.audit import VARIABLE as LOG
from coordinator.config.deployment_names import is_facility
from coordinator.events.event import VARIABLE, emit
from coordinator.streamflow_plugin.forked_steps import OF_COORDINATOR, OF_FACILITY, ForkedSteps, step_of_command
from coordinator.streamflow_plugin.job_progress import JobWatch, command_runner, run_watch
from coordinator.streamflow_plugin.last_words import last_words, words_of_job
from coordinator.streamflow_plugin.overdue import note_failed
from coordinator.streamflow_plugin.patient import step_of
from facility.exchange.exit_codes import ExitCode

STEPS = ("start", "send", "receive", "aggregate", "report")
"""The coordinator's own steps, by the first word of their names; none of them fails for a facility's fault."""
EXPANDED = re.compile(r'[$`"\\]')
"""What a shell reads between double quotes as something else than itself."""
LOOK_SECONDS = 1.0
"""Between two looks at processes that an earlier run left."""
OURS, FACILITIES = ForkedSteps(), ForkedSteps(hidden=(VARIABLE, LOG))
"""From which the coordinator's steps, and the rounds of facilities on this machine, are forked."""


class TellingLocalConnector(LocalConnector):
    """`type: local`, the same settings. Cores, memory and disks of this machine are those of all such connectors."""

    machine: Hardware | None = None

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        hardware: Hardware = TellingLocalConnector.machine or self._hardware  # type: ignore[has-type]
        TellingLocalConnector.machine = self._hardware = hardware

    async def deploy(self, external: bool) -> None:
        """Nothing to make: all work in folders of this run (`engine_folder`)."""

    async def run(
        self,
        location: ExecutionLocation,
        command: MutableSequence[str],
        *args: Any,
        job_name: str | None = None,
        **rest: Any,
    ) -> tuple[str, int] | None:
        if job_name is None:
            return await super().run(location, command, *args, job_name=job_name, **rest)
        step = step_of(job_name)
        emit("executing", step=step)
        if not is_facility(self.deployment_name):
            answer = await self._run_step(location, command, *args, job_name=job_name, **rest)
        else:
            workdir = rest.get("workdir") or (args[1] if len(args) > 1 else ".")
            emit("began", step=step, job="")
            async with run_watch(JobWatch(step=step, directory=workdir, ask=command_runner(self, location))):
                answer = await self._run_step(location, command, *args, job_name=job_name, **rest)
            said, code = answer if answer is not None else ("", 0)
            emit("ended", step=step, job="", code=code, problem="")
            facility = step.rpartition("/")[2].partition("_")[2]  # its login node has a deployment of another name
            if words := words_of_job(facility, code, said or ""):
                emit("problem", text=note_failed(words))
        if answer is not None and answer[1] and step.rpartition("/")[2].partition("_")[0] in STEPS:
            reason = last_words(answer[0] or "") or f"it ended with code {answer[1]}"
            emit("failed", step=step, reason=reason, futile=answer[1] == ExitCode.INPUT)
        return answer

    async def _run_step(
        self, location: ExecutionLocation, command: MutableSequence[str], *args: Any, **rest: Any
    ) -> tuple[str, int] | None:
        """A fork where the command allows it, else a process of its own as StreamFlow starts it."""
        at_facility = is_facility(self.deployment_name)
        streams = {rest.get(name) for name in ("stdin", "stdout", "stderr")} - {None, asyncio.subprocess.STDOUT}
        if not args and not streams and rest.get("capture_output"):
            step = step_of_command(
                command,
                modules=OF_FACILITY if at_facility else OF_COORDINATOR,
                directory=rest.get("workdir"),
                environment=os.environ | location.environment,
                own=rest.get("environment") or {},
            )
            answer = (
                await (FACILITIES if at_facility else OURS).run(step, timeout=rest.get("timeout")) if step else None
            )
            if answer is not None:
                return answer
        if at_facility:  # event file and log are the coordinator's alone
            command = ["unset", VARIABLE, LOG, "&&", *command]
        if rest.get("workdir"):  # StreamFlow writes it bare into the shell's line
            rest["workdir"] = shlex.quote(rest["workdir"])
        if rest.get("environment"):  # and these between double quotes: HOME and TMPDIR, which lie in the workdir
            rest["environment"] = {name: EXPANDED.sub(r"\\\g<0>", value) for name, value in rest["environment"].items()}
        return await super().run(location, command, *args, **rest)

    async def settle(self, location: ExecutionLocation, directory: str) -> None:
        """Wait for the end of processes that an earlier run left at work in a job's directory."""
        while working_in(directory):
            await asyncio.sleep(LOOK_SECONDS)


def working_in(directory: str) -> bool:
    """True if that is the working directory of a living process of this user."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if os.readlink(link) == directory:
                return True
        except OSError:  # it has ended, or is another user's
            continue
    return False
