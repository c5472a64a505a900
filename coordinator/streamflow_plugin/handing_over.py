"""How a job that waits for its round is reached: by a shell at its login node, or by requests to the gate there."""

from __future__ import annotations

import base64
import math
import posixpath
import shlex
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from streamflow.core.deployment import ExecutionLocation

from coordinator.rounds.ahead import Placeholder
from coordinator.streamflow_plugin.gate import GateRefused, job_of, options_of
from facility.exchange.exit_codes import BROKE
from facility.exchange.gate_requests import GATE
from facility.exchange.messages.ahead import BEGAN, COMMAND, MOST_BYTES, WAITED

BEHIND_GATE = "the gate's own directory"
"""Stands for the place of a job that waits behind a gate, which no request names."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One job of a round, as the engine submits it."""

    command: str
    """The round's own, before it is put into the job template."""
    job_name: str
    """The engine's name for it."""
    workdir: str
    environment: Mapping[str, str] | None = None
    streams: Mapping[str, Any] = field(default_factory=dict)


class Lines(Protocol):
    """What is needed of a queue connector."""

    async def shell_line(self, location: ExecutionLocation, line: str) -> tuple[str, int]:
        """What a line prints at the login node, and its code; `BROKE` for a lost answer."""

    async def answer_to(
        self, location: ExecutionLocation, command: str, read: Callable[[str, int], bool | None]
    ) -> bool:
        """What `read` finds in the answer to a line, asked until it finds something."""


class ByShell:
    """In a directory of the account, beside those of jobs."""

    def __init__(self, queue: Lines) -> None:
        self.queue = queue

    def place(self, one: Submission) -> str:
        """Where the job will wait."""
        return posixpath.join(posixpath.dirname(one.workdir.rstrip("/")), f"ahead-{uuid.uuid4().hex}")

    async def prepare(self, directory: str, location: ExecutionLocation) -> None:
        line = f"mkdir -m 700 -p {shlex.quote(directory)}"
        await self.queue.answer_to(location, line, lambda _, code: None if code == BROKE else True)

    def waiting(self, one: Submission, directory: str, seconds: float) -> Submission:
        """What is submitted: the round `one` with a wait in place of its command."""
        return replace(one, command=waiting(directory, seconds), workdir=directory)

    async def hand(self, found: Placeholder, command: str, location: ExecutionLocation) -> bool:
        """Give a job the round; may be asked again. False: something else was decided before."""
        place, own = shlex.quote(f"{found.directory}/{COMMAND}"), shlex.quote(f"{found.directory}/{uuid.uuid4().hex}")
        packed = base64.b64encode(f"{command}\n".encode()).decode()
        written = f"umask 077 && echo {packed} | base64 -d > {own}"
        line = f"{written} && {{ ln {own} {place} 2>/dev/null; cmp -s {own} {place}; }}"
        return await self.queue.answer_to(location, line, _done)

    async def waited(self, found: Placeholder, location: ExecutionLocation) -> str:
        """What the job wrote of its wait, or ''."""
        line = f"head -c {MOST_BYTES} {shlex.quote(f'{found.directory}/{WAITED}')}"
        text, code = await self.queue.shell_line(location, line)
        return text if code == 0 else ""


class ByGate:
    """The gate makes the directory and writes the round's command itself, once it has approved the round."""

    def __init__(self, queue: Lines) -> None:
        self.queue = queue

    def place(self, one: Submission) -> str:
        return BEHIND_GATE

    async def prepare(self, directory: str, location: ExecutionLocation) -> None:
        """Nothing: that is the gate's."""

    def waiting(self, one: Submission, directory: str, seconds: float) -> Submission:
        settings = options_of(one.command)["--settings"]
        words = [GATE, "submit-ahead", "--settings", settings, "--wait", str(math.ceil(seconds))]
        return replace(one, command=shlex.join(words))

    async def hand(self, found: Placeholder, command: str, location: ExecutionLocation) -> bool:
        """False as well where the gate refuses the round: submitted as always, it is refused with the reason."""
        try:
            return await self.queue.answer_to(location, job_of(command, "hand-over", "--job", found.job), _done)
        except GateRefused:
            return False

    async def waited(self, found: Placeholder, location: ExecutionLocation) -> str:
        try:
            text, code = await self.queue.shell_line(location, shlex.join([GATE, "waited", found.job]))
        except GateRefused:
            return ""
        return text if code == 0 else ""


def _done(text: str, code: int) -> bool | None:
    return None if code == BROKE else code == 0


def waiting(directory: str, wait: float) -> str:
    """The placeholder's command. Where the facility's CrossFed cannot wait, a round that is there is run at once."""
    place = shlex.quote(directory)
    return (
        f"export {BEGAN}=$(date +%s) && cd {place} && "
        f"{{ python3 -m facility.ahead --directory {place} --wait {wait:g} || [ $? -eq 1 ]; }} && . {place}/{COMMAND}"
    )
