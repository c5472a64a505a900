"""The engine's side of `coordinator.streamflow_plugin.step_server`: which commands are forked, and how.

A command is forked where it is `python3 -m MODULE` of this environment's own Python and of a module listed here, with
nothing that a shell would have to work out. Everything else is a process of its own, as StreamFlow starts it.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coordinator.streamflow_plugin.names import SEPARATE_STEPS
from coordinator.streamflow_plugin.step_server import MOST_BYTES
from coordinator.streamflow_plugin.within import with_timeout

OF_COORDINATOR = frozenset(
    f"coordinator.steps.{step}"
    for step in ("start", "send", "receive", "aggregate", "report", "roster", "survivors", "aggregate_masked")
)
OF_FACILITY = frozenset({"facility.round", "facility.keys", "facility.unmask"})
BUSY_SECONDS = 0.01
END_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command that can be forked."""

    module: str
    arguments: list[str]
    directory: str
    environment: dict[str, str]


def step_of_command(
    command: Sequence[str],
    *,
    modules: frozenset[str],
    directory: str | None,
    environment: Mapping[str, str],
    own: Mapping[str, str],
) -> Step | None:
    """The command as a step to fork; None where it needs a process of its own.

    `environment`: what the process starts with; `own`: what the engine sets for this step.
    """
    text = " ".join(command)
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    plain = shlex.join(words) == text and words[:2] == ["python3", "-m"] and words[2:3] and words[2] in modules
    if not plain or directory is None:
        return None
    whole = {**environment, **own}
    if SEPARATE_STEPS in whole or not is_this_python(whole.get("PATH", os.defpath)):
        return None
    return Step(module=words[2], arguments=words[3:], directory=directory, environment=whole)


def is_this_python(path: str) -> bool:
    """True if `python3` there is of the environment that runs the engine, perhaps by a link, as to a larger disk."""
    found = shutil.which("python3", path=path)
    return found is not None and Path(found).parent.resolve() == Path(sys.executable).parent.resolve()


class ForkedSteps:
    """One server of steps, started when the first step needs it."""

    def __init__(self, hidden: Sequence[str] = ()) -> None:
        """`hidden`: variables that the server and its steps do not get."""
        self._hidden = frozenset(hidden)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._number = 0
        self._codes: dict[int, asyncio.Future[int]] = {}

    async def run(self, step: Step, *, timeout: float | None = None) -> tuple[str, int] | None:
        """What the step printed and its exit code; None where no server can take it."""
        self._number += 1
        number = self._number
        environment = {key: value for key, value in step.environment.items() if key not in self._hidden}
        request = json.dumps(
            {
                "number": number,
                "module": step.module,
                "arguments": step.arguments,
                "directory": step.directory,
                "environment": environment,
            }
        ).encode()
        if len(request) >= MOST_BYTES or not self._up():
            return None
        loop = asyncio.get_running_loop()
        reads, writes = os.pipe()
        code: asyncio.Future[int] = loop.create_future()
        self._codes[number] = code
        try:
            sent = await self._send(request, writes)
        finally:
            os.close(writes)
        if not sent:
            os.close(reads)
            self._codes.pop(number, None)
            return None
        return await with_timeout(timeout, self._result(reads, code))

    async def _result(self, reads: int, code: asyncio.Future[int]) -> tuple[str, int]:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reads, "rb", buffering=0)
        )
        try:
            text = await reader.read()
            return text.decode(errors="replace").strip(), await code
        finally:
            transport.close()

    async def _send(self, request: bytes, handle: int) -> bool:
        """False where the server has ended."""
        while self._channel is not None:
            try:
                socket.send_fds(self._channel, [request], [handle])
                return True
            except BlockingIOError:
                await asyncio.sleep(BUSY_SECONDS)
            except OSError:
                return False
        return False

    def _up(self) -> bool:
        """Start the server if there is none; False where there was one and it has ended."""
        if self._process is not None:
            return self._channel is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "coordinator.streamflow_plugin.step_server", str(theirs.fileno())],
                env={key: value for key, value in os.environ.items() if key not in self._hidden},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._channel = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._answers)
        atexit.register(self.close)
        return True

    def _answers(self) -> None:
        assert self._channel is not None
        while True:
            try:
                text = self._channel.recv(MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:
                text = b""
            if not text:
                return self._gone()
            answer = json.loads(text)
            code = self._codes.pop(answer["number"], None)
            if code is not None and not code.done():
                code.set_result(answer["code"])

    def _gone(self) -> None:
        """The server has ended: what became of the steps at work is not known, and they count as failed."""
        assert self._channel is not None
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close()
        self._channel = None
        for code in self._codes.values():
            if not code.done():
                code.set_result(1)
        self._codes.clear()

    def close(self) -> None:
        """End the server; steps at work go on."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
