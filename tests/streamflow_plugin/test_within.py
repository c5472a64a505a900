"""A task that is cancelled ends, though its answer comes in the same moment; what takes too long ends in time."""

from __future__ import annotations

import ast
import asyncio

import pytest

from coordinator.streamflow_plugin.lanes import CHANNELS, TransferFailed, spread_work
from coordinator.streamflow_plugin.within import with_timeout
from tests.conftest import ROOT


def test_a_cancellation_is_not_lost_when_the_answer_comes_in_the_same_moment():
    async def cancelled() -> bool:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(with_timeout(10, answer))
        await asyncio.sleep(0)
        answer.set_result(1)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(cancelled())


def test_what_takes_too_long_is_cancelled_and_told_and_an_answer_or_error_comes_through():
    ended = []

    async def for_ever() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def fails() -> None:
        raise KeyError("x")

    with pytest.raises(TimeoutError):
        asyncio.run(with_timeout(0.01, for_ever()))
    assert ended == [True]
    with pytest.raises(KeyError):
        asyncio.run(with_timeout(1, fails()))
    assert asyncio.run(with_timeout(None, asyncio.sleep(0, "answer"))) == "answer"


def test_no_lane_takes_another_piece_after_one_has_failed():
    """Even one that loses its cancellation, as libraries with `asyncio.wait_for` of Python 3.11 do."""
    moved = []

    async def move(lane: str, piece: int) -> None:
        moved.append(piece)
        if piece == 0:
            await asyncio.sleep(0.01)
            raise TransferFailed("refused")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

    with pytest.raises(TransferFailed, match="refused"):
        asyncio.run(spread_work(["a"], range(50), move))
    assert len(moved) == CHANNELS


def test_nothing_waits_by_what_loses_cancellations():
    files = [file for room in ("coordinator", "facility") for file in (ROOT / room).rglob("*.py")]
    assert files
    found = {
        str(file.relative_to(ROOT)): node.lineno
        for file in files
        if "wait_for" in (text := file.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.wait_for"
    }
    assert found == {}, "use coordinator.streamflow_plugin.within, or asyncio.timeout"
