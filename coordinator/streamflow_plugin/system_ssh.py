"""The ssh connector over the system's ssh (`ssh: system`): a connection that the user has opened is used.

Where a login needs a second factor and no certificate is given, a person opens one connection that ssh shares
(`ssh -MNf leonardo`, with `ControlPath` in ~/.ssh/config); every command and transfer is then a session in it. Once it
is gone and ssh cannot log in alone, the facility waits for its login, as with an expired certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncssh
from streamflow.core.deployment import ExecutionLocation
from streamflow.core.exception import WorkflowExecutionException
from streamflow.deployment.connector.ssh import SSHConfig
from streamflow.log_handler import logger

from coordinator.events.event import emit
from coordinator.streamflow_plugin import openssh
from coordinator.streamflow_plugin.lanes import end_kept
from coordinator.streamflow_plugin.patient_login import PatientLogin
from coordinator.streamflow_plugin.problems import report_problem
from coordinator.streamflow_plugin.ssh import ParallelSSHConnector
from coordinator.streamflow_plugin.swift import SwiftLane, login_of, swift_lanes
from coordinator.streamflow_plugin.waiting import Waiting
from coordinator.streamflow_plugin.within import with_timeout
from facility.exchange.exit_codes import BROKE

OPTIONS = ("-o", "ControlMaster=no")
"""A shared connection is used where there is one, and never opened: it would outlive its command here."""
END_SECONDS = 10.0
TRY_SECONDS = 120.0
"""What a command that does nothing may take, the login included: on a login node whose file system hangs, none ends."""
STREAMS = 3
"""Sessions at once of one transfer's lanes, each of which moves two pieces: a shared connection has ten in all."""
REFUSALS = ("permission denied", "too many authentication failures", "no more authentication methods")
NO_SESSION = b"open refused by peer"
"""ssh's words where a shared connection has as many sessions as sshd gives it, MaxSessions of sshd_config(5)."""
REST_SECONDS = 0.5
"""Of a session's place where there are few: sshd counts one for a moment after it has ended here."""
WRONG_HOST = ("host key verification failed", "remote host identification has changed")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended, by asyncssh's names."""

    exit_status: int | None
    """None: the connection broke."""
    stdout: Any
    stderr: Any

    @property
    def returncode(self) -> int | None:
        return self.exit_status


class Session:
    """One running ssh, as the parts of an `asyncssh.SSHClientProcess` that the connector uses."""

    stderr = None
    """Read by this class alone."""

    def __init__(self, process: asyncio.subprocess.Process, encoding: str | None) -> None:
        self.stdin, self.stdout = process.stdin, process.stdout
        self._process, self._encoding, self._said = process, encoding, bytearray()
        # The standard error never fills its pipe.
        self._listens = asyncio.create_task(end_kept(process.stderr, said=self._said))

    async def wait(self) -> Ended:
        """Read what is left of the output, of which the end is kept, and wait for the end."""
        out = await end_kept(self.stdout)
        await self._listens
        code: int | None = await self._process.wait()
        if code == BROKE or code is not None and code < 0:
            code = None
        return Ended(exit_status=code, stdout=self._text(out), stderr=self._text(bytes(self._said)))

    @property
    def broke(self) -> bool:
        """True where ssh itself failed, not the command."""
        return self._process.returncode == BROKE

    @property
    def refused(self) -> bool:
        """True where the shared connection had no session left, and ssh could not log in anew either."""
        return self.broke and NO_SESSION in self._said

    async def close(self) -> None:
        """End the session; the remote command's input and output close with it."""
        if self.stdin is not None:
            self.stdin.close()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                await with_timeout(END_SECONDS, self._process.wait())
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self.broke:
            await asyncio.wait([self._listens], timeout=END_SECONDS)  # its last words
        self._listens.cancel()

    def _text(self, data: bytes) -> Any:
        return data if self._encoding is None else data.decode(self._encoding, errors="replace")


class SystemLogin:
    """The system's ssh to one host: logs in before it runs commands, and waits while the login is refused."""

    def __init__(
        self,
        config: SSHConfig,
        *,
        sessions: int,
        retries: int,
        retry_delay: int,
        nothing: str,
        login: PatientLogin | None,
        waiting: Waiting,
    ) -> None:
        """`nothing`: a command that does nothing. `login`: None where a refused login is an error at once."""
        found = login_of(config)
        if found is None:
            raise WorkflowExecutionException(
                f"`ssh: system` cannot log in to {config.hostname}: it needs the ssh command, checked host keys and no "
                "passphrase file"
            )
        self.host, self._login, self._waiting = config.hostname, login, waiting
        self._words = openssh.openssh_command(found, connect_seconds=config.connect_timeout, options=OPTIONS)
        self._retries, self._delay, self._nothing = retries, retry_delay, nothing
        self._most, self._running, self._free = sessions, 0, asyncio.Event()
        self._told = False
        self._open, self._turn = False, asyncio.Lock()
        self._shared: list[str] | None = None

    def get(
        self,
        command: str,
        environment: MutableMapping[str, str] | None,
        stdin: int = asyncio.subprocess.PIPE,
        stdout: int = asyncio.subprocess.PIPE,
        stderr: int = asyncio.subprocess.PIPE,
        encoding: str | None = "utf-8",
    ) -> AbstractAsyncContextManager[Session]:
        """A session that runs `command`; the arguments are those of StreamFlow's `SSHContextFactory.get`."""
        given = " ".join(f"{key}={shlex.quote(value)}" for key, value in (environment or {}).items())
        line = f"env {given} {command}" if given else command
        return self._session(line, (stdin, stdout, stderr), encoding)

    @asynccontextmanager
    async def _session(
        self, command: str, streams: tuple[int, int, int], encoding: str | None
    ) -> AsyncIterator[Session]:
        while self._running >= self._most:
            self._free.clear()
            await self._free.wait()
        self._running += 1
        session = None
        try:
            await self._logged_in()
            if self._told:
                await asyncio.sleep(REST_SECONDS)
            stdin, stdout, stderr = streams
            process = await asyncio.create_subprocess_exec(
                *self._words, command, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
            )
            session = Session(process, encoding)
            try:
                yield session
            finally:
                await session.close()
                if session.broke:
                    self._open = False
        finally:
            self._running -= 1
            if session is not None and session.refused:
                self.fewer()
            self._free.set()

    def fewer(self) -> None:
        """Give no more sessions at once than run now: the shared connection had no other. Two at least: the shell that
        stays open would leave none to others."""
        self._most = min(self._most, max(2, self._running))
        if not self._told:
            self._told = True
            report_problem(
                f"the shared connection to {self.host} has fewer sessions than `sessions:` says (MaxSessions of its "
                f"sshd): no more than {self._most} at once from now on; set `sessions:` to what it gives"
            )

    async def close(self) -> None:
        """Nothing is kept open here: a shared connection is the user's."""

    async def _logged_in(self) -> None:
        """Return once the login works; a host that is away is tried `retries` times."""
        async with self._turn:
            for attempt in range(self._retries):
                if self._open:
                    return
                if attempt:
                    await self._waiting.pause(self._delay)
                self._waiting.check(self.host)
                try:
                    await self._through()
                    self._open = True
                    if self._login is not None:
                        self._login.report_reached()
                except ConnectionError as error:
                    logger.warning(f"connection to {self.host}: attempt {attempt}: {error}")
                    if self._login is not None:
                        self._login.report_unreachable(self.host, error)
            if not self._open:
                raise WorkflowExecutionException(f"{self.host} cannot be reached, tried {self._retries} times")

    async def _through(self) -> None:
        if self._login is not None:
            if self._shared is None:
                self._shared = await self._socket()
                self._login.files = [*self._login.files, *self._shared]
            return await self._login.through(self.host, self._try)
        try:
            await self._try()
        except asyncssh.PermissionDenied as error:
            raise WorkflowExecutionException(f"{self.host} refuses the login: {error}") from error

    async def _try(self) -> None:
        """Run a command that does nothing. Raises what a connection of asyncssh would."""
        process = await asyncio.create_subprocess_exec(
            *self._words,
            self._nothing,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(TRY_SECONDS):
                said = await end_kept(process.stderr)
                await process.wait()
        except TimeoutError:
            raise ConnectionError(f"it ran no command within {TRY_SECONDS:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode != BROKE:
            return
        words = said.decode(errors="replace").strip()
        last = (words.splitlines() or ["ssh said nothing"])[-1]
        if any(mark in words.lower() for mark in WRONG_HOST):
            owner = openssh.key_owner(words)
            said_of_it = next((line for line in words.splitlines() if openssh.BAD_CERTIFICATE in line), last)
            emit("host_key", host=self.host, owner=owner, reason=said_of_it)
            whose = openssh.shown_owner(self.host, owner)
            raise WorkflowExecutionException(f"the host key of {whose} is not the one in known_hosts: {said_of_it}")
        if any(mark in words.lower() for mark in REFUSALS):
            raise asyncssh.PermissionDenied(last)
        raise ConnectionError(last)

    async def _socket(self) -> list[str]:
        """Path of the shared connection's socket, by whose appearance a renewed login is noticed."""
        process = await asyncio.create_subprocess_exec(
            self._words[0], "-G", *self._words[1:], stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        said, _ = await process.communicate()
        found = re.search(r"^controlpath (\S.*)$", said.decode(errors="replace"), re.MULTILINE)
        return [found[1]] if found and found[1] != "none" else []


class SystemSSHConnector(ParallelSSHConnector):
    """`type: system-ssh`, the settings of `ssh`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._logins: dict[str, SystemLogin] = {}

    def _factory(self, config: SSHConfig, connections: int, least: int) -> Any:
        """One login for all: its sessions share the user's connection."""
        if config.hostname not in self._logins:
            self._logins[config.hostname] = SystemLogin(
                config,
                sessions=self.maxConcurrentSessions,
                retries=self.retries,
                retry_delay=self.retryDelay,
                nothing=self.dialect.nothing,
                login=self._login,
                waiting=self._waiting,
            )
        return self._logins[config.hostname]

    async def end_of(
        self,
        location: ExecutionLocation,
        text: str,
        most: int,
        timeout: int | None,
        **how: Any,
    ) -> tuple[str, int | None]:
        """As the original; ssh's own words stand in the answer here."""
        said, code = await super().end_of(location, text, most, timeout, **how)
        if code is None and NO_SESSION.decode() in said:
            self._factory(self.nodes[location.name], 1, 1).fewer()
        return said, code

    def try_again(self) -> None:
        """Nothing to do: attempts are counted per command."""

    def lanes(self, location: ExecutionLocation) -> list[Any]:
        return super().lanes(location)[:STREAMS]

    def swift(self, location: ExecutionLocation, count: int) -> AbstractAsyncContextManager[list[SwiftLane]]:
        """None: they log in anew. The lanes are the system's ssh already."""
        return swift_lanes(self.dataTransferConfig or self.nodes[location.name], 0, 0, self.dialect)
