"""A watch over a job ends with the job, whatever its last look meets."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.streamflow_plugin.job_progress import JobWatch, run_watch
from coordinator.streamflow_plugin.names import PROGRESS_SECONDS


@pytest.mark.parametrize("end", [None, TimeoutError()], ids=["an answer", "an error"])
def test_a_cancellation_that_is_lost_in_a_look_keeps_no_job_from_ending(
    monkeypatch: pytest.MonkeyPatch, end: Exception | None
):
    """As `asyncio.wait_for` of Python 3.11 loses one that comes with the answer: the job's step hung for ever."""
    monkeypatch.setenv(PROGRESS_SECONDS, "0.01")
    looks = []

    async def ask(command: list[str]) -> None:
        looks.append(command)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if end is not None:
                raise end from None

    async def job() -> None:
        async with run_watch(JobWatch(step="/rounds/train_a", directory="/there", ask=ask)):
            while not looks:
                await asyncio.sleep(0.001)

    async def ends() -> bool:
        done, _ = await asyncio.wait([task := asyncio.create_task(job())], timeout=50)
        if not done:
            task.cancel()
        return bool(done)

    assert asyncio.run(ends()) and len(looks) == 1
