"""Sessions in StreamFlow's ssh connections: an sshd that gives fewer than were asked for is believed.

sshd refuses a session beyond its `MaxSessions` (sshd_config(5); some sites set 1) and leaves the connection as it is.
The original asks for it again without end, and holds up every other session of the host meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import MutableMapping
from typing import Any

import asyncssh
from streamflow.core.exception import WorkflowExecutionException
from streamflow.deployment.connector.ssh import SSHConfig, SSHContext, SSHContextFactory, SSHContextManager
from streamflow.log_handler import logger

from coordinator.streamflow_plugin.problems import report_problem
from coordinator.streamflow_plugin.waiting import Waiting
from facility.exchange.text import number_of

LEAST = 4
"""Sessions that a login node must give at once: the shell, a job without a queue, the look at its progress, and one for
everything else."""
OPEN_SECONDS = 600.0
"""A host that answers, and opens no session within this, is one that gives none: as long as it may be silent. Such a
try counts as many as would have fit into it."""
LAG_SECONDS = 1.0
"""sshd may count a session for a moment after it has ended here."""
FAILED = (
    asyncssh.ChannelOpenError,
    asyncssh.ConnectionLost,
    asyncssh.DisconnectError,
    ConnectionError,
    asyncio.TimeoutError,
)
"""What may be tried again."""


class Given:
    """How many sessions the hosts of one deployment give each connection."""

    def __init__(self, wanted: int) -> None:
        """`wanted`: as many as the settings say."""
        self._wanted = wanted
        self._known: dict[str, int] = {}
        self._members: list[Sessions] = []
        self.reasons: dict[str, str] = {}
        """By host: why the latest try, whoever made it, got no session."""

    def each(self, host: str) -> int:
        return min(self._wanted, self._known.get(host, self._wanted))

    def join(self, member: Sessions) -> None:
        self._members.append(member)

    def learn(self, host: str, most: int) -> None:
        """Report it, once for each host, and hold all connections there to it."""
        first = host not in self._known
        self._known[host] = min(most, self.each(host))
        for member in self._members:
            if member.host == host:
                member.fit()
        if first:
            report_problem(
                f"sshd of {host} gives each connection {most} at once of the {self._wanted} sessions that `sessions:` "
                f"asks for (its MaxSessions): more connections are used; `sessions: {most}` says so from the start"
            )


class Sessions(SSHContextFactory):
    """The connections to one host. `least`: sessions that there must be at once, however few sshd gives each
    connection; more connections are opened for it."""

    def __init__(
        self,
        *,
        least: int,
        given: Given,
        waiting: Waiting,
        cls_context: Any,
        streamflow_config_dir: str,
        config: SSHConfig,
        max_connections: int,
        retries: int,
        retry_delay: int,
    ) -> None:
        self.host, self._least, self.given, self._waiting = config.hostname, least, given, waiting
        self._one = {"streamflow_config_dir": streamflow_config_dir, "config": config}
        self._class = cls_context
        super().__init__(
            cls_context=cls_context,
            **self._one,
            max_concurrent_sessions=given.each(self.host),
            max_connections=max_connections,
            retries=retries,
            retry_delay=retry_delay,
        )
        given.join(self)
        self.fit()

    def get(self, command: str, environment: MutableMapping[str, str] | None, **streams: Any) -> SSHContextManager:
        return _Session(
            given=self.given,
            waiting=self._waiting,
            condition=self._condition,
            contexts=self._contexts,
            command=command,
            environment=environment,
            retries=self._retries,
            retry_delay=self._retry_delay,
            **streams,
        )

    def fit(self) -> None:
        """Hold each connection to what it is given, and have as many as `least` sessions need."""
        each = self.given.each(self.host)
        for context in self._contexts:
            context._max_concurrent_sessions = each
        while len(self._contexts) < math.ceil(self._least / each):
            self._contexts.append(self._class(**self._one, max_concurrent_sessions=each))


class _Session(SSHContextManager):
    def __init__(self, *, given: Given, waiting: Waiting, **settings: Any) -> None:
        super().__init__(**settings)
        self._given, self._waiting = given, waiting
        self._refused: dict[int, int] = {}
        """By connection that refused a session: how many it had."""

    async def __aenter__(self) -> asyncssh.SSHClientProcess:
        """As the original, but that nobody waits for one that sleeps between two tries. Raises
        `WorkflowExecutionException` once every connection has failed as often as it may."""
        while True:
            self._waiting.check(self._contexts[0].get_hostname())
            async with self._condition:
                usable = [one for one in self._contexts if one.connection_attempts < self._retries]
                if not usable:
                    host, tries = self._contexts[0].get_hostname(), number_of(self._retries, "try", "tries")
                    reason = self._given.reasons.get(host, "")
                    raise WorkflowExecutionException(f"{host} gives no session ({tries}): {reason}")
                free = [one for one in usable if not one.full()]
                if not free:
                    await self._condition.wait()
                    continue
                for context in free:
                    connection, before = None, 0
                    try:
                        connection = await context.get_connection()
                        before = len(connection._channels)
                        return await self._begun(context, connection)
                    except FAILED as error:
                        self._given.reasons[context.get_hostname()] = said = _words(error)
                        if connection is None or connection.is_closed():
                            await context.reset()
                            pause = float(self._retry_delay)
                        else:
                            pause = self._after_refusal(context, connection, before)
                        if pause != LAG_SECONDS:
                            logger.warning(f"{context.get_hostname()} gives no session: {said}")
            await self._waiting.pause(pause)

    def _after_refusal(self, context: SSHContext, connection: asyncssh.SSHClientConnection, before: int) -> float:
        """Seconds until the next try, after a connection that lives and had `before` sessions gave no other.

        The second time that it had as many, that is all it gives. One that gives none at all counts as one that failed.
        """
        if not before:
            context.connection_attempts += 1
            return LAG_SECONDS if context.connection_attempts == 1 else float(self._retry_delay)
        if self._refused.get(id(connection)) == before:
            self._given.learn(context.get_hostname(), before)
            return 0.0
        self._refused[id(connection)] = before
        return LAG_SECONDS

    async def _begun(self, context: SSHContext, connection: asyncssh.SSHClientConnection) -> asyncssh.SSHClientProcess:
        opening = connection.create_process(
            self.command,
            env=self.environment,
            stdin=self.stdin,
            stdout=self.stdout,
            stderr=self.stderr,
            encoding=self.encoding,
        )
        try:
            process: asyncssh.SSHClientProcess = await self._waiting.within(OPEN_SECONDS, opening)
        except TimeoutError:
            connection.abort()  # to asyncssh the session counts as open, for ever
            # `retries` and `retryDelay` say for how long it is tried: this took as long as many tries of a host away.
            context.connection_attempts += max(0, math.ceil(OPEN_SECONDS / max(1, self._retry_delay)) - 1)
            raise TimeoutError(f"it opened none within {OPEN_SECONDS:g} s") from None
        self._selected_context, self._proc = context, process
        await process.__aenter__()
        context.connection_attempts = 0
        return process


def _words(error: BaseException) -> str:
    """Why there is no session, as the system says it where it does: `Connection refused`."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return f"{type(error).__name__}: {error}"
