"""A login that is refused is waited for: one try at a time and gently, while jobs and the other facilities go on.

Sites give certificates of some hours behind a second factor, so that every long federation meets one that has expired.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import asyncssh
from streamflow.log_handler import logger

from coordinator.events.event import emit
from coordinator.streamflow_plugin.names import LOGINS
from coordinator.streamflow_plugin.problems import LOGIN, report_away, report_back
from coordinator.streamflow_plugin.waiting import Waiting

REFUSED = (asyncssh.PermissionDenied, asyncssh.KeyImportError, FileNotFoundError)
"""What a refused login looks like: also a key or certificate that is just being replaced."""
PAUSE_SECONDS = 60.0
"""Between two tries: sites lock out addresses that fail often. A renewal that can be seen here ends the pause."""
LOOK_SECONDS = 1.0
"""Between two looks for a renewal."""

T = TypeVar("T")


@dataclass(kw_only=True)
class PatientLogin:
    """What all connections to one deployment know of its login."""

    facility: str
    """The facility's name, as federation.yml has it."""
    files: Sequence[str] = ()
    """The private keys; a certificate is `<key>-cert.pub` beside one."""
    pause_seconds: float = PAUSE_SECONDS
    _refused: bool = False
    waiting: Waiting = field(default_factory=Waiting)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def through(self, host: str, connect: Callable[[], Awaitable[T]]) -> T:
        """What `connect` returns; a refused login is tried again without end. Other errors are the caller's.

        While the login is refused, one connection tries and the others wait for it.
        """
        while True:
            if not self._refused:
                try:
                    return await connect()
                except REFUSED as error:
                    self._tell(host, error)
            async with self._turn:
                while self._refused:
                    await self._pause()
                    self.waiting.check(host)
                    try:
                        connection = await connect()
                    except REFUSED:
                        continue
                    self._refused = False
                    logger.info(f"{host} takes the login again")
                    emit("login_works", facility=self.facility, host=host)
                    return connection

    def report_unreachable(self, host: str, error: BaseException) -> None:
        """Reported once while it lasts; every later use tries the connection again."""
        report_away(self.facility, f"{host}: {error}", LOGIN)

    def report_reached(self) -> None:
        """Reported after `report_unreachable` alone."""
        report_back(self.facility, LOGIN)

    async def _pause(self) -> None:
        """Until the next try: the whole pause, or less once a key, a certificate or `crossfed login` is new."""
        before, clock = self._renewed(), asyncio.get_running_loop().time
        until = clock() + self.pause_seconds
        while (left := until - clock()) > 0 and self._renewed() == before and not self.waiting.ended:
            await self.waiting.pause(min(LOOK_SECONDS, left))

    def _renewed(self) -> list[int]:
        """When each file that a renewal changes was written; 0: it does not exist."""
        paths = [Path(name).expanduser() for file in self.files for name in (file, f"{file}-cert.pub")]
        if folder := os.environ.get(LOGINS):
            paths.append(Path(folder, self.facility))
        return [_changed(path) for path in paths]

    def _tell(self, host: str, error: Exception) -> None:
        if not self._refused:
            self._refused = True
            logger.warning(f"{host} refuses the login ({error}): waiting for it")
            emit("login_refused", facility=self.facility, host=host, reason=str(error))


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
