"""A login that is refused is waited for: one try at a time and gently, while jobs and the other facilities go on.

Sites give certificates of some hours behind a second factor, so that every long federation meets one that has expired.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import asyncssh
from streamflow.log_handler import logger

from coordinator.events.event import emit

REFUSED = (asyncssh.PermissionDenied, asyncssh.KeyImportError, FileNotFoundError)
"""What a refused login looks like: also a key or certificate that is just being replaced."""
PAUSE_SECONDS = 60.0
"""Between two tries: sites lock out addresses that fail often."""

T = TypeVar("T")


@dataclass(kw_only=True)
class PatientLogin:
    """What all connections to one deployment know of its login."""

    facility: str
    """Name of the deployment, without what marks it as a facility's."""
    pause_seconds: float = PAUSE_SECONDS
    _refused: bool = False
    _unreachable: bool = False
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
                    await asyncio.sleep(self.pause_seconds)
                    try:
                        connection = await connect()
                    except REFUSED:
                        continue
                    self._refused = False
                    logger.info(f"{host} takes the login again")
                    emit("login_works", facility=self.facility, host=host)
                    return connection

    def tell_unreachable(self, host: str, error: BaseException) -> None:
        """Once while it lasts: the connection is tried again by whoever needs it."""
        if not self._unreachable:
            self._unreachable = True
            logger.warning(f"{host} cannot be reached ({error}): trying again")
            emit("problem", text=f"{host} cannot be reached ({error}): it is tried again, the other facilities go on")

    def tell_reached(self, host: str) -> None:
        if self._unreachable:
            self._unreachable = False
            logger.info(f"{host} can be reached again")
            emit("problem", text=f"{host} can be reached again")

    def _tell(self, host: str, error: Exception) -> None:
        if not self._refused:
            self._refused = True
            logger.warning(f"{host} refuses the login ({error}): waiting for it")
            emit("login_refused", facility=self.facility, host=host, reason=str(error))
