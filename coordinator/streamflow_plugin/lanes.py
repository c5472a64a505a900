"""Several ssh connections to one host, each carrying one transfer at a time; a piece that breaks is sent again.

A single ssh stream moves at most one channel window (2 MiB in OpenSSH and asyncssh) per round trip: 168 Mbit/s at
100 ms however fast the link is (RFC 4254, section 5.2). Streams side by side add up.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import asyncssh
from streamflow.core.exception import WorkflowExecutionException
from streamflow.deployment.connector.ssh import SSHContextFactory
from streamflow.log_handler import logger

from coordinator.streamflow_plugin.dialect import ANNOUNCE, BEGINS
from coordinator.streamflow_plugin.within import with_timeout
from facility.exchange.exit_codes import ended_by_signal

BLOCK_BYTES = 1 << 18
"""Bytes read or written at once."""
CHANNELS = 2
"""Pieces at once in each connection: while one waits for its command to start or end, the other moves."""
STALL_SECONDS = 120.0
"""A connection that moves nothing for so long counts as broken."""
LEAST_BYTES_PER_SECOND = 20_000
"""A piece that arrives more slowly is given up: a facility that sends byte by byte delays no other."""
ATTEMPTS = 10
"""Times one piece may break before the transfer is given up; waiting for a lost host is the connection's own matter."""
BROKEN = (asyncssh.Error, ConnectionError, BrokenPipeError, asyncio.TimeoutError, asyncio.IncompleteReadError)

ROUND_TRIPS_SECONDS = 0.025
"""A second connection pays once a trivial command takes longer than twice this, a third once it takes three times..."""
FEWEST = 2

T = TypeVar("T")
L = TypeVar("L")
R = TypeVar("R")


class TransferFailed(WorkflowExecutionException):
    """The other side said no: what it said is the message."""


async def lane_count(lane: SSHContextFactory, most: int, nothing: str) -> int:
    """Log in, and return the number of connections for this distance: two at a short one, where one process can fill
    the link and more only wait for each other, and `most` from about 100 ms of round trip on. `nothing`: a command that
    does nothing."""
    await retry_broken(functools.partial(read_output, lane, nothing))
    start = time.monotonic()
    await retry_broken(functools.partial(read_output, lane, nothing))
    return min(most, max(FEWEST, int((time.monotonic() - start) / ROUND_TRIPS_SECONDS)))


async def spread_work(lanes: Sequence[L], work: Iterable[T], move: Callable[[L, T], Awaitable[None]]) -> None:
    """Let every lane take the next piece of work until none is left; a broken piece is moved again.

    Raises `TransferFailed` when the other side refuses, and what StreamFlow raises when a host stays away.
    """
    waiting = list(work)[::-1]

    async def serve(lane: L) -> None:
        while waiting:
            item = waiting.pop()
            await retry_broken(functools.partial(move, lane, item))

    tasks = [asyncio.create_task(serve(lane)) for lane in (list(lanes) * CHANNELS)[: len(waiting)]]
    try:
        await asyncio.gather(*tasks)
    finally:
        waiting.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def retry_broken(act: Callable[[], Awaitable[R]]) -> R:
    """Do it again while the connection breaks under it. `act` must be harmless to repeat."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await act()
        except BROKEN as error:
            broken = error
            logger.warning(f"a transfer broke ({describe(error)}); this piece is moved again")
            await asyncio.sleep(min(5.0, attempt))
    raise TransferFailed(
        f"a connection broke {ATTEMPTS} times during one transfer, last: {describe(broken)}"
    ) from broken


def describe(error: BaseException) -> str:
    """An exception as a person would name it."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def feed_input(lane: SSHContextFactory, command: str, blocks: Iterable[bytes | memoryview]) -> None:
    """Feed a remote command's input; raises `TransferFailed` with its own words when it does not end with 0."""
    async with lane.get(command=command, environment=None, encoding=None) as process:
        try:
            for block in blocks:
                process.stdin.write(block)
                await with_timeout(STALL_SECONDS, process.stdin.drain())
            process.stdin.write_eof()
        except BROKEN:
            # A command that ended early closes its input: then it has an exit status, and the reason is its own.
            if (refusal := await _refusal(process, command)) is not None:
                raise refusal from None
            raise
        await _ended(process, command)


async def take_output(
    lane: SSHContextFactory, command: str, take: Callable[[bytes], Any], length: int | None, text: bytes = b""
) -> None:
    """Hand a remote command's output to `take`; with `length`, exactly so many bytes must come.

    Raises `TransferFailed` where they do not, or where the command has said why.
    """
    answer = Answer(command)
    async with lane.get(command=command, environment=None, encoding=None) as process:
        if text:
            process.stdin.write(text)
        process.stdin.write_eof()
        count, start = 0, time.monotonic()
        while block := await with_timeout(STALL_SECONDS, process.stdout.read(BLOCK_BYTES)):
            if part := answer.of(block):
                count += len(part)
                take(part)
            check_pace(count, time.monotonic() - start, command)
        await _ended(process, command)
        answer.check_begun()
        if length is not None and count != length:
            raise TransferFailed(f"`{command:.120}` gave {count} bytes, expected {length}")


NOISE_BYTES = 1 << 16
"""What start-up files may print before an answer."""


class Answer:
    """Parts a command's answer from what the account's start-up files printed before it."""

    def __init__(self, command: str) -> None:
        self._command, self._before = command, b""
        self.begun = not command.startswith(ANNOUNCE)

    def of(self, block: bytes) -> bytes:
        """What of the next block belongs to the answer. Raises `TransferFailed` for noise that does not end."""
        if self.begun:
            return block
        self._before += block
        noise, mark, rest = self._before.partition(BEGINS)
        if len(noise) > NOISE_BYTES:
            raise TransferFailed(f"{self._wanted()}, which printed more than {NOISE_BYTES} bytes before it")
        self.begun = bool(mark)
        return rest if mark else b""

    def check_begun(self) -> None:
        """Raise `TransferFailed` where the output ended without the answer."""
        if not self.begun:
            raise TransferFailed(f"{self._wanted()}, which printed {self._before[-100:]!r} in its place")

    def _wanted(self) -> str:
        return f"`{self._command.removeprefix(ANNOUNCE):.60}` was given to the login shell of the facility"


def check_pace(count: int, seconds: float, command: str) -> None:
    """Raise `TransferFailed` for a stream that trickles."""
    if seconds > STALL_SECONDS and count < (seconds - STALL_SECONDS) * LEAST_BYTES_PER_SECOND:
        raise TransferFailed(f"`{command:.60}` gave {count} bytes in {seconds:.0f} s: too slow to wait for")


KEPT_BYTES = 1 << 16
"""Of what a command of the system's ssh writes beside its answer."""
MOST_BESIDE = 1 << 20
"""Bytes that a remote command may write to its standard error, or to an output that is no answer."""
MOST_OUTPUT = 64 << 20
"""Bytes that a remote command may answer, unless the caller knows better."""


async def read_output(lane: SSHContextFactory, command: str, text: bytes = b"", *, most: int = MOST_OUTPUT) -> bytes:
    """A remote command's whole output; more than `most` bytes raise `TransferFailed`, and are not kept."""
    blocks: list[bytes] = []
    count = 0

    def take(block: bytes) -> None:
        nonlocal count
        count += len(block)
        if count > most:
            raise TransferFailed(f"`{command:.60}` answered more than {most} bytes")
        blocks.append(block)

    await take_output(lane, command, take, None, text)
    return b"".join(blocks)


async def _ended(process: Any, command: str) -> None:
    status, said = await with_timeout(STALL_SECONDS, _end_of(process, command))
    if status is None:
        raise ConnectionResetError(f"the connection closed, or a signal came, before `{command:.60}` ended")
    if status:
        raise TransferFailed(failure_words(said, status))


async def _refusal(process: Any, command: str) -> TransferFailed | None:
    try:
        status, said = await with_timeout(5.0, _end_of(process, command))
    except BROKEN:
        return None
    return TransferFailed(failure_words(said, status)) if status else None


async def _end_of(process: Any, command: str) -> tuple[int | None, bytes]:
    """Exit code and standard error of a command whose output nobody reads any more; None for the code of one that a
    signal ended, which has answered as little as one whose connection broke.

    `process`: asyncssh's, whose `wait` keeps all that still comes, or a `system_ssh.Session`, which keeps little.
    Raises `TransferFailed` for more than `MOST_BESIDE` bytes.
    """
    streams = [stream for stream in (process.stdout, process.stderr) if stream is not None]
    readers = [asyncio.ensure_future(_read_out(stream, command)) for stream in streams]
    try:
        rest = await asyncio.gather(*readers)
    finally:
        for reader in readers:
            reader.cancel()
    result = await process.wait()
    status = result.exit_status
    if status is not None and ended_by_signal(status):
        status = None
    return status, result.stderr or (rest[-1] if process.stderr is not None else b"")


async def _read_out(stream: Any, command: str) -> bytes:
    """What comes until the end of a stream."""
    said = b""
    while block := await stream.read(BLOCK_BYTES):
        said += block
        if len(said) > MOST_BESIDE:
            raise TransferFailed(f"`{command:.60}` printed more than {MOST_BESIDE} bytes beside its answer")
    return said


async def end_kept(stream: Any, most: int = KEPT_BYTES, said: bytearray | None = None) -> bytes:
    """The last `most` bytes of a stream, which is read to its end; `said` holds those that have come so far."""
    said = bytearray() if said is None else said
    while stream is not None and (block := await stream.read(BLOCK_BYTES)):
        said += block
        del said[:-most]
    return bytes(said)


def failure_words(stderr: Any, status: int) -> str:
    """What a remote command said of its failure: the cause, not tar's closing line."""
    lines = [line.strip() for line in (stderr or b"").decode(errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if "Exiting with failure status" not in line] or lines
    causes = [line for line in lines if any(word in line for word in ("No space left", "quota", "denied", "Read-only"))]
    return (causes or lines or [f"the remote command ended with code {status} and said nothing"])[-1]


def blocks_of(file: int, offset: int, length: int) -> Iterable[bytes]:
    """A file's range in blocks; a file that became shorter raises `TransferFailed`."""
    end = offset + length
    while offset < end:
        block = os.pread(file, min(BLOCK_BYTES, end - offset), offset)
        if not block:
            raise TransferFailed(f"a file became shorter than {end} bytes while it was sent")
        yield block
        offset += len(block)
