"""What an open shell at a facility answers: bounded, and a lost connection is distinguished from any other error."""

from __future__ import annotations

from typing import Any

import asyncssh
from streamflow.core.exception import WorkflowExecutionException

from coordinator.streamflow_plugin.lanes import MOST_OUTPUT


class AnswerLost(ConnectionResetError):
    """The connection ended while a command's answer was awaited."""


class BoundedReader:
    """A shell's output; more than `MOST_OUTPUT` bytes in answer to one command are an error, not kept."""

    def __init__(self, reader: Any) -> None:
        self._reader, self._count = reader, 0

    async def read(self, size: int) -> bytes:
        try:
            block = await self._reader.read(size)
        except asyncssh.Error as error:
            raise AnswerLost(str(error)) from error
        self._count += len(block)
        if self._count > MOST_OUTPUT:
            raise WorkflowExecutionException(f"a command answered more than {MOST_OUTPUT} bytes")
        return bytes(block)

    async def close(self) -> None:
        await self._reader.close()

    @staticmethod
    def reset_by(writer: Any, reader: BoundedReader) -> Any:
        """The writer, each of whose writes begins a command."""
        write = writer.write

        async def begin(data: Any) -> None:
            reader._count = 0
            await write(data)

        writer.write = begin
        return writer
