"""What an open shell at a facility answers: bounded, and a lost connection is distinguished from any other error."""

from __future__ import annotations

import time
from typing import Any

import asyncssh
from streamflow.core.exception import WorkflowExecutionException

from coordinator.schedulers.scheduler import ANSWER_BYTES

ANSWER_SECONDS = 3600.0
"""Until a whole answer is here: StreamFlow's own limit is for each piece of it."""

TERMINATED = "Shell process is terminated"
"""StreamFlow's words to a command that waited for a shell while the one before it met the shell's end."""


class AnswerLost(ConnectionResetError):
    """The connection or the shell ended while a command's answer was awaited."""


class NotBegun(BrokenPipeError):
    """The connection or the shell had ended before the command was given to it."""


class AnswerTooLong(WorkflowExecutionException):
    """More than was to be read; nothing of it is kept."""


def timeout_error(deployment: str, shown: str, seconds: float | None) -> WorkflowExecutionException:
    """The error for a command that took too long there. `shown`: the command as a person knows it, without the shell
    lines around it."""
    return WorkflowExecutionException(
        f"{deployment} does not answer: `{shown:.100}` did not end within {seconds} s; try it by hand there, where the "
        "login node or a file system may hang"
    )


def not_begun(error: WorkflowExecutionException) -> bool:
    """True where nothing of the command was sent, so that any may be given again."""
    return isinstance(error.__cause__, NotBegun) or str(error) == TERMINATED


class BoundedReader:
    """A shell's output; more than `ANSWER_BYTES` in answer to one command, or `ANSWER_SECONDS`, are an error."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.begin()

    def begin(self) -> None:
        """A new command is given."""
        self._count, self._until = 0, time.monotonic() + ANSWER_SECONDS

    async def read(self, size: int) -> bytes:
        try:
            block = await self._reader.read(size)
        except asyncssh.Error as error:
            raise AnswerLost(str(error)) from error
        if not block:
            raise AnswerLost("the shell ended")
        self._count += len(block)
        if self._count > ANSWER_BYTES:
            raise AnswerTooLong(f"a command answered more than {ANSWER_BYTES} bytes")
        if time.monotonic() > self._until:
            raise WorkflowExecutionException(f"a command did not end its answer within {ANSWER_SECONDS:g} s")
        return bytes(block)

    async def close(self) -> None:
        await self._reader.close()

    @staticmethod
    def reset_by(writer: Any, reader: BoundedReader) -> Any:
        """The writer, each of whose writes begins a command.

        A write raises `NotBegun` where nothing of it was sent, `AnswerLost` where some of it may have been.
        """
        write = writer.write

        async def begin(data: Any) -> None:
            reader.begin()
            if writer.stream.is_closing():
                raise NotBegun("the shell had ended")
            try:
                await write(data)
            except asyncssh.Error as error:
                raise AnswerLost(str(error)) from error

        writer.write = begin
        return writer
