"""StreamFlow's ssh connector for a facility behind a gate (`gate: true`): requests in place of shell lines.

The engine's own commands are few (they were recorded from runs), so each is translated; one that is not known is an
error here, before it is refused there. No shell is opened, and no persistent one either.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import MutableMapping, MutableSequence

from streamflow.core.deployment import ExecutionLocation
from streamflow.core.exception import WorkflowExecutionException
from streamflow.log_handler import logger

from coordinator.streamflow_plugin.dialect import GateDialect
from coordinator.streamflow_plugin.patient import ConnectionBroke
from coordinator.streamflow_plugin.ssh import ATTEMPTS, COMMAND_BYTES, COMMAND_SECONDS, ParallelSSHConnector
from facility.exchange.errors import ManifestError
from facility.exchange.exit_codes import ExitCode, ended_by_signal
from facility.exchange.gate_requests import GATE
from facility.exchange.messages.strict_json import Fields, parse_json

PYTHON, OUT = ["python3", "-m"], ["--out", "update"]
LOGIN = {"facility.keys": "keys", "facility.unmask": "unmask"}
"""Verb of each command that needs no queue."""
MOST_HOURS = 168.0
"""What a site's policy counts for at most as the time limit of its jobs, and what stands for it where none is given."""
HELLO_SECONDS = 60
STORAGE = re.compile(r"^find -L .* -exec ls -ln ")
EXPORT = re.compile(r'export (HOME|TMPDIR)="([^"]+)"')


class GateRefused(WorkflowExecutionException):
    """What the facility's gate said."""


def request_of(command: str) -> str:
    """A command of the engine's as a request to the gate. Raises `WorkflowExecutionException` for any other."""
    words = shlex.split(command)
    match words:
        case [program, *_] if program == GATE:
            return command
        case ["test", ("-e" | "-d" | "-f" | "-L" | "-x") as flag, path]:
            return shlex.join([GATE, "test", flag, path])
        case ["test", "-e", path, "&&", "readlink", "-f", same] if path == same:
            return shlex.join([GATE, "resolve", path])
        case ["test", "-f", path, "&&", "sha1sum", same, "|", "awk", "{print $1}"] if path == same:
            return shlex.join([GATE, "sha1", path])
        case ["mkdir", "-m", _, "-p", *paths] | ["mkdir", "-p", *paths]:
            return shlex.join([GATE, "make", *paths])
        case ["rm", "-rf", *paths]:
            return shlex.join([GATE, "remove", *paths])
        case ["find", *_, path, "-mindepth", "1", "-maxdepth", "1", "-type", ("d" | "f") as kind]:
            return shlex.join([GATE, "walk", kind, path])
        case ["head", "-c", _, path]:
            return shlex.join([GATE, "get-file", path])
        case ["ln", "-snf", source, target]:
            return shlex.join([GATE, "link", source, target])
    raise WorkflowExecutionException(f"a gate has no request for `{command:.200}`")


def options_of(command: str) -> dict[str, str]:
    """Options of a facility's step by name, from the command that the engine made of its tool in cwl/tools."""
    words = shlex.split(command.strip().removesuffix("2>&1").split(" && ")[-1])
    return dict(zip(words[3::2], words[4::2], strict=False))


def job_of(command: str, verb: str, *more: str) -> str:
    """The request for a step at the facility, from the command that the engine made of its tool in cwl/tools.

    `verb`: for a training job; `more`: words that follow it.
    """
    *set_up, last = command.strip().removesuffix("2>&1").split(" && ")
    exports = {found[1]: found[2] for one in set_up if (found := EXPORT.fullmatch(one))}
    words = shlex.split(last)
    module, given = words[2] if len(words) > 2 else "", words[5:]
    known = {"facility.round": verb} | (LOGIN if verb == "run" else {})
    if words[:5] != [*PYTHON, module, *OUT] or module not in known or len(given) % 2 or len(exports) != 2:
        raise WorkflowExecutionException(f"a gate takes the steps of a round only, this is `{command:.200}`")
    return shlex.join(
        [GATE, known[module], *more, "--directory", exports["HOME"], "--temporary", exports["TMPDIR"], *given]
    )


class GatedSSHConnector(ParallelSSHConnector):
    """`type: gate`, the settings of `ssh`."""

    dialect = GateDialect()
    refused = GateRefused
    _hours: float | None = None

    async def run(
        self,
        location: ExecutionLocation,
        command: MutableSequence[str],
        environment: MutableMapping[str, str] | None = None,
        workdir: str | None = None,
        stdin: int | str | None = None,
        stdout: int | str = asyncio.subprocess.STDOUT,
        stderr: int | str = asyncio.subprocess.STDOUT,
        capture_output: bool = False,
        timeout: int | None = None,
        job_name: str | None = None,
    ) -> tuple[str, int] | None:
        if job_name is not None:
            return await super().run(
                location, command, environment, workdir, stdin, stdout, stderr, capture_output, timeout, job_name
            )
        if STORAGE.search(" ".join(command)):  # the engine's bookkeeping of storage, which decides nothing here
            return ("0", 0) if capture_output else None
        text, code = await self.ask(location, request_of(" ".join(command)), timeout)
        return (text, code) if capture_output else None

    async def ask(
        self, location: ExecutionLocation, request: str, timeout: int | None = None, *, attempts: int = ATTEMPTS
    ) -> tuple[str, int]:
        """Send a request; returns what was printed and the exit code.

        Raises `GateRefused`, and `ConnectionBroke` where the answer was lost as often as it may be asked for: the
        connection broke, or a signal ended the gate, or what it ran.
        """
        for _ in range(attempts):
            said, code = await self.end_of(location, request, COMMAND_BYTES, timeout or COMMAND_SECONDS)
            if code == ExitCode.REFUSED:
                raise GateRefused(f"{self.deployment_name}: {said[-500:]}")
            if code is not None and not ended_by_signal(code):
                return said, code
        where, during = self.deployment_name, f"during `{request:.100}`"
        if code is None:
            raise ConnectionBroke(f"the connection to {where} broke {during}")
        raise ConnectionBroke(f"the gate of {where} was killed (code {code}) {during}")

    async def hours_of_a_job(self, location: ExecutionLocation) -> float:
        """The time limit of the site's policy, the wait of a job that is submitted ahead included; asked once.

        A gate that states none, or nonsense, has `MOST_HOURS`; so has one that does not answer, which is asked again.
        """
        if self._hours is None:
            try:
                said, _ = await self.ask(location, f"{GATE} hello", HELLO_SECONDS, attempts=1)
                where = f"the gate of {self.deployment_name}"
                summary = Fields(raw=parse_json(said.rpartition("\n")[2], where=where), where=where)
                self._hours = min(summary.number("hours"), MOST_HOURS) or MOST_HOURS
            except ManifestError as error:
                logger.warning(f"{error}: its jobs are taken to be of {MOST_HOURS:g} hours")
                self._hours = MOST_HOURS
            except WorkflowExecutionException as error:
                logger.warning(f"no time limit of its jobs is known now: {error}")
        return self._hours or MOST_HOURS

    async def submit_job(self, location: ExecutionLocation, command: str, **_: str) -> str:
        """Have the gate submit its own template for a training command; returns what it printed, the job's id.

        Name, directory and output are the site's own matter. `command` may be the request itself.
        """
        request = command if command.startswith(f"{GATE} ") else job_of(command, "submit")
        text, code = await self.ask(location, request, attempts=1)  # the job may be in the queue
        if code:
            raise WorkflowExecutionException(f"the gate of {self.deployment_name} submitted nothing: {text[-300:]}")
        return text

    def job_line(self, command: str) -> str:
        """A command on the host itself; the gate ends it once the connection is gone."""
        return job_of(command, "run")
