"""Waits for a host that is away or refuses a login: none outlasts the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from streamflow.core.exception import WorkflowExecutionException

T = TypeVar("T")


class Waiting:
    """All waits of one deployment's connections. A host that is away is tried again for hours, which would hold up the
    end of a run."""

    def __init__(self) -> None:
        self._end = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Nobody is to wait any longer."""
        return self._end.is_set()

    def check(self, host: str) -> None:
        """Raise `WorkflowExecutionException` where nobody is to wait for `host` any longer."""
        if self.ended:
            raise WorkflowExecutionException(f"{host} is not waited for any longer: the run ends")

    async def pause(self, seconds: float) -> None:
        """Wait between two tries, at most until the end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._end.wait()

    async def within(self, seconds: float, awaited: Awaitable[T]) -> T:
        """What `awaited` returns or raises. Raises `TimeoutError` where it takes longer, or at the end; it is cancelled
        then."""
        task, end = asyncio.ensure_future(awaited), asyncio.ensure_future(self._end.wait())
        try:
            await asyncio.wait((task, end), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise TimeoutError
            return task.result()
        finally:
            task.cancel()
            end.cancel()

    @contextmanager
    def end(self) -> Iterator[None]:
        """Let go what waits, while the connections are closed; what uses them again afterwards waits again."""
        self._end.set()
        try:
            yield
        finally:
            self._end.clear()
