"""Time limits for what is awaited, by `asyncio.timeout`.

`asyncio.wait_for` of Python 3.11 drops a cancellation that comes with the answer (CPython issue 86296, mended in 3.12):
a task that was to end goes on, and whoever waits for its end waits for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def with_timeout(seconds: float | None, awaited: Awaitable[T]) -> T:
    """What `awaited` returns or raises. Raises `TimeoutError` where it takes longer; it is cancelled then."""
    async with asyncio.timeout(seconds):
        return await awaited
