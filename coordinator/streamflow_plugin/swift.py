"""Large files through the system's ssh, whose cryptography is compiled: Python fills a core long before a link.

A lane is one connection: an ssh that stays for one transfer and shares itself (ControlMaster), and for every piece a
client that hands the pipe with its bytes over to it. Files and pipes are joined by the kernel where it can (splice), so
the bytes do not pass through Python. What breaks here is moved again by StreamFlow's own connections, with their
patience.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from streamflow.deployment.connector.ssh import SSHConfig
from streamflow.log_handler import logger

from coordinator.streamflow_plugin import openssh
from coordinator.streamflow_plugin.dialect import SHELL, ShellDialect
from coordinator.streamflow_plugin.lanes import (
    BLOCK_BYTES,
    STALL_SECONDS,
    Answer,
    TransferFailed,
    check_pace,
    end_kept,
    failure_words,
)
from coordinator.streamflow_plugin.within import with_timeout
from facility.exchange.exit_codes import BROKE
from facility.exchange.gate_requests import ARRIVED

OPTIONS = (
    "-e",
    "none",
    "-o",
    "Ciphers=aes128-gcm@openssh.com,aes256-gcm@openssh.com,aes128-ctr,aes256-ctr,chacha20-poly1305@openssh.com",
    "-o",
    "Compression=no",
    "-o",
    "ControlPersist=no",
    "-o",
    "ServerAliveInterval=30",
    "-o",
    "ServerAliveCountMax=4",
)
PIPE_BYTES = 1 << 20
"""Asked for each pipe; a system may give less."""
LONGEST_FOLDER = 107 - 17 - len("/999")
"""Bytes of the path of a folder of sockets: a socket's may have 107, and ssh appends 17 to it while it makes one."""
END_SECONDS = 10.0
"""Seconds for a process to end after SIGTERM."""
NO_SPLICE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def login_of(config: SSHConfig) -> openssh.Login | None:
    """StreamFlow's login as one for the system's ssh; None where that cannot or must not do the same."""
    if shutil.which("ssh") is None or not hasattr(os, "splice"):
        return None
    if (
        config.password_file
        or config.ssh_key_passphrase_file
        or not config.check_host_key
        or len(config.client_keys) > 1
    ):
        return None
    jump = None
    if config.tunnel is not None:
        jump = login_of(config.tunnel)
        if jump is None:
            return None
    key = config.client_keys[0] if config.client_keys else ""
    return openssh.Login(host=config.hostname, user=config.username or "", key=key, jump=jump)


class SwiftLane:
    """One connection of the system's ssh; any number of pieces at once."""

    def __init__(
        self,
        words: list[str],
        master: asyncio.subprocess.Process,
        pool: ThreadPoolExecutor,
        dialect: ShellDialect = SHELL,
    ) -> None:
        self._words, self._master, self._pool, self._dialect = words, master, pool, dialect

    async def put(self, command: str, file: int, offset: int, length: int) -> None:
        """Feed a range of an open file to a remote command. Raises `TransferFailed`, or what `BROKEN` names."""
        ours = _Pipe()
        said = await self._move(
            self._dialect.confirmed(command), ours, ours.reader, lambda: _pour(file, offset, length, ours)
        )
        # A client of a connection that breaks may end with 0: only the command itself can say that it has all.
        if ARRIVED.encode() not in said:
            raise ConnectionResetError("the connection broke before the remote command ended")

    async def get(self, command: str, file: int, offset: int, length: int) -> None:
        """Write a remote command's output, exactly `length` bytes, to a range of an open file."""
        ours = _Pipe()
        await self._move(command, ours, ours.writer, lambda: _drain(file, offset, length, ours, command))

    async def _move(self, command: str, pipe: _Pipe, end: int, work: Callable[[], None]) -> bytes:
        """Give the command one end of the pipe; returns what it wrote to an output that is not the pipe."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words,
                command,
                stdin=end if end == pipe.reader else asyncio.subprocess.DEVNULL,
                stdout=end if end == pipe.writer else asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except BaseException:
            pipe.close_both()
            raise
        pipe.give(end)
        ending: asyncio.Future[tuple[bytes, bytes]] = asyncio.ensure_future(_end_of(process))
        moving: asyncio.Future[None] = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            failure: Exception | None = None
            try:
                await _watched(moving, pipe, command if end == pipe.writer else "")
            except (OSError, TransferFailed) as error:
                failure = error
            answer, said = await with_timeout(STALL_SECONDS, asyncio.shield(ending))
            # The command's own words first: that it ended is why the pipe broke.
            if process.returncode == BROKE:
                raise ConnectionResetError(failure_words(said, BROKE))
            if process.returncode:
                raise TransferFailed(failure_words(said, process.returncode))
            if failure is not None:
                raise failure
            return answer or b""
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            waiting: list[asyncio.Future[Any]] = [moving, ending]
            _, left = await asyncio.wait(waiting, timeout=END_SECONDS)
            if left:  # the connection itself holds the other end of the pipe
                self._kill()
                await asyncio.wait(left)
            moving.exception()  # seen: what matters of it has been raised
            pipe.close_both()

    async def close(self) -> None:
        """End the connection."""
        if self._master.stdin is not None:
            self._master.stdin.close()
        try:
            await with_timeout(END_SECONDS, self._master.wait())
        except TimeoutError:
            self._kill()
            await self._master.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._master.kill()


async def _end_of(process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    """The end of what a client prints to output and standard error, as far as these are pipes, once it has ended."""
    said = await asyncio.gather(end_kept(process.stdout), end_kept(process.stderr))
    await process.wait()
    return said


@contextlib.asynccontextmanager
async def swift_lanes(
    config: SSHConfig, count: int, channels: int, dialect: ShellDialect = SHELL
) -> AsyncIterator[list[SwiftLane]]:
    """Up to `count` connections, closed at the end; none if the system's ssh cannot be used."""
    login = login_of(config)
    if login is None or not count:
        yield []
        return
    folder = _place_of_sockets()
    lanes: list[SwiftLane] = []
    with ThreadPoolExecutor(count * channels, thread_name_prefix="swift") as pool:
        try:
            opened = await asyncio.gather(
                *(_open(login, config.connect_timeout, folder / str(number), pool, dialect) for number in range(count))
            )
            lanes = [lane for lane in opened if lane is not None]
            yield lanes
        finally:
            await asyncio.gather(*(lane.close() for lane in lanes))
            shutil.rmtree(folder, ignore_errors=True)


def _place_of_sockets() -> Path:
    """A new folder, mode 0700: whoever reaches a socket has our login. Below /tmp where the name of a socket in TMPDIR
    would be longer than one may be (unix(7)): ssh would then make no connection."""
    folder = Path(tempfile.mkdtemp(prefix="crossfed-"))
    if len(os.fsencode(folder)) <= LONGEST_FOLDER:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="crossfed-", dir="/tmp"))


async def _open(
    login: openssh.Login, seconds: int, socket: Path, pool: ThreadPoolExecutor, dialect: ShellDialect
) -> SwiftLane | None:
    """One connection, or None with a line in the log.

    It carries a remote `cat`, whose input ends when this process does, however it ends: then the connection ends too.
    """
    shared = (*OPTIONS, "-o", f"ControlPath={socket}")
    words = openssh.openssh_command(login, connect_seconds=seconds, options=(*shared, "-o", "ControlMaster=yes"))
    master = await asyncio.create_subprocess_exec(
        *words,
        dialect.hold,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert master.stdout is not None
    try:
        answer = await with_timeout(seconds + 30, master.stdout.readline())
    except TimeoutError:
        answer = b""
    except BaseException:
        master.kill()
        raise
    client = openssh.openssh_command(login, connect_seconds=seconds, options=(*shared, "-o", "ControlMaster=no"))
    lane = SwiftLane(client, master, pool, dialect)
    if not answer:
        await lane.close()
        logger.info(f"a connection of the system's ssh to {login.host} was not made; the transfer does without it")
        return None
    return lane


class _Pipe:
    """A pipe between a thread of ours and an ssh client; counts what has moved."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.moved = 0
        self._open = {self.reader, self.writer}
        self._lock = threading.Lock()
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def give(self, end: int) -> None:
        """Close an end that this process no longer needs."""
        with self._lock:
            if end in self._open:
                self._open.remove(end)
                os.close(end)

    def close_both(self) -> None:
        for end in (self.reader, self.writer):
            self.give(end)


def _pour(file: int, offset: int, length: int, pipe: _Pipe) -> None:
    """A range of a file into the pipe, in a thread."""
    end = offset + length
    try:
        while offset < end:
            moved = _joined(file, pipe.writer, min(PIPE_BYTES, end - offset), source_offset=offset)
            if not moved:
                raise TransferFailed(f"a file became shorter than {end} bytes while it was sent")
            offset += moved
            pipe.moved += moved
    finally:
        pipe.give(pipe.writer)


def _drain(file: int, offset: int, length: int, pipe: _Pipe, command: str) -> None:
    """The pipe's bytes into a range of a file, in a thread; not one more than were asked for."""
    end = offset + length
    try:
        offset += _begin(file, offset, length, pipe, command)
        while offset < end:
            moved = _joined(pipe.reader, file, min(PIPE_BYTES, end - offset), target_offset=offset)
            if not moved:
                # Perhaps the file is shorter, perhaps the connection broke: whoever moves it again finds out.
                raise ConnectionResetError(f"`{command:.120}` gave {length - (end - offset)} bytes, expected {length}")
            offset += moved
            pipe.moved += moved
        if os.read(pipe.reader, 1):
            raise TransferFailed(f"`{command:.120}` gave more than the {length} bytes that were listed")
    finally:
        pipe.give(pipe.reader)


def _begin(file: int, offset: int, length: int, pipe: _Pipe, command: str) -> int:
    """Read until the command's answer begins; returns the bytes of it that came with that, which are in the file."""
    answer, first = Answer(command), b""
    while not answer.begun:
        if not (block := os.read(pipe.reader, BLOCK_BYTES)):
            raise ConnectionResetError(f"`{command:.120}` gave nothing")
        pipe.moved += len(block)
        first = answer.of(block)
    if len(first) > length:
        raise TransferFailed(f"`{command:.120}` gave more than the {length} bytes that were listed")
    done = 0
    while done < len(first):
        done += os.pwrite(file, first[done:], offset + done)
    return done


def _joined(
    source: int, target: int, count: int, *, source_offset: int | None = None, target_offset: int | None = None
) -> int:
    """Move up to `count` bytes between a file and a pipe; 0 at the end. Falls back to read and write without splice."""
    try:
        return os.splice(source, target, count, offset_src=source_offset, offset_dst=target_offset)
    except OSError as error:
        if error.errno not in NO_SPLICE:
            raise
    count = min(count, BLOCK_BYTES)
    block = os.read(source, count) if source_offset is None else os.pread(source, count, source_offset)
    done = 0
    while done < len(block):
        left = block[done:]
        done += os.write(target, left) if target_offset is None else os.pwrite(target, left, target_offset + done)
    return len(block)


async def _watched(moving: asyncio.Future[None], pipe: _Pipe, pulling: str) -> None:
    """Wait for the thread; `asyncio.TimeoutError` once it has moved nothing for `STALL_SECONDS`.

    `pulling`: the command whose output comes, which must not trickle; '': something is sent.
    """
    start = time.monotonic()
    while True:
        before = pipe.moved
        done, _ = await asyncio.wait([moving], timeout=STALL_SECONDS)
        if done:
            return moving.result()
        if pipe.moved == before:
            raise TimeoutError
        if pulling:
            check_pace(pipe.moved, time.monotonic() - start, pulling)
