"""Connections to login nodes that stay open between two questions: sites count logins, and lock out who makes many."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from coordinator.streamflow_plugin.within import within

CLOSE_SECONDS = 10.0
"""How long a connection may take to close."""


class KeptLogins:
    """One connection a facility, in a thread of its own. Questions of one facility wait for each other."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="logins", daemon=True)
        self._open: dict[str, tuple[Any, Any]] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    def ask(
        self, facility: str, connect: Callable[[], tuple[Any, Any]], command: str, seconds: float
    ) -> tuple[str, int]:
        """What `command` prints at the facility, and its code, within `seconds`.

        `connect` makes a connector and its location where none is open. Whatever the connector raises is the caller's;
        one that was open and has broken meanwhile is made anew.
        """
        if not self._thread.is_alive():
            self._thread.start()
        asking = within(seconds, self._in_turn(facility, connect, command))
        return asyncio.run_coroutine_threadsafe(asking, self._loop).result()

    async def _in_turn(self, facility: str, connect: Callable[[], tuple[Any, Any]], command: str) -> tuple[str, int]:
        async with self._turns.setdefault(facility, asyncio.Lock()):
            if facility in self._open:
                with suppress(Exception):
                    return await self._run(facility, command)
            self._open[facility] = connect()
            return await self._run(facility, command)

    async def _run(self, facility: str, command: str) -> tuple[str, int]:
        connector, location = self._open[facility]
        try:
            answer = await connector.run(location=location, command=[command], capture_output=True)
        except BaseException:
            del self._open[facility]
            await _closed(connector)
            raise
        return answer or ("", 1)

    def close(self) -> None:
        """Close all connections."""

        async def all_closed() -> None:
            await asyncio.gather(*(_closed(connector) for connector, _ in self._open.values()))

        if self._thread.is_alive():
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(all_closed(), self._loop).result(2 * CLOSE_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


@contextmanager
def kept_logins() -> Iterator[KeptLogins]:
    logins = KeptLogins()
    try:
        yield logins
    finally:
        logins.close()


async def _closed(connector: Any) -> None:
    with suppress(Exception):
        await within(CLOSE_SECONDS, connector.undeploy(False))
