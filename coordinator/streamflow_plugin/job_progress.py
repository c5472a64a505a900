"""How far a running job is: its small progress file, read over the connection that the workflow holds anyway.

One plain command per job and interval, in a session of its own, so that a file system that hangs holds up no other
question. What it prints is another machine's text: cut to size, parsed strictly, passed on as numbers.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from streamflow.core.deployment import Connector, ExecutionLocation

from coordinator.events.event import emit
from coordinator.streamflow_plugin.names import PROGRESS_SECONDS
from facility.exchange.errors import ManifestError
from facility.exchange.messages.progress import FILE, MOST_BYTES, JobProgress, read_progress

ANSWER_SECONDS = 20
"""An answer that takes longer is not waited for."""
ESTIMATE_SECONDS = 60.0
"""Between two questions for the scheduler's estimate of a waiting job's start."""

Ask = Callable[[list[str]], Awaitable[str | None]]
"""Runs a command at the facility; what it prints, or None where it fails."""


def look_interval() -> float:
    """Seconds between two looks; 0: progress is not followed."""
    try:
        return max(0.0, float(os.environ.get(PROGRESS_SECONDS, "0")))
    except ValueError:
        return 0.0


def command_runner(connector: Connector, location: ExecutionLocation) -> Ask:
    """Commands over `connector`'s open connection, in a session of their own (`stdin`: not the shared shell)."""

    async def ask(command: list[str]) -> str | None:
        answer = await connector.run(
            location=location,
            command=command,
            stdin=asyncio.subprocess.DEVNULL,
            capture_output=True,
            timeout=ANSWER_SECONDS,
        )
        return answer[0] if answer is not None and answer[1] == 0 else None

    return ask


def command(directory: str) -> list[str]:
    """Prints the progress file of the job in `directory`, at most `MOST_BYTES` of it."""
    return ["head", "-c", str(MOST_BYTES), shlex.quote(f"{directory}/{FILE}")]


class JobWatch:
    """Looks at one job until cancelled."""

    def __init__(self, *, step: str, directory: str, ask: Ask) -> None:
        self.step, self.directory, self.ask = step, directory, ask
        self.last: JobProgress | None = None
        self.waits: Callable[[], bool] = lambda: False
        """True while the job is known to wait in a queue."""
        self.estimate: Callable[[], Awaitable[None]] | None = None
        """Asks when the job will begin."""
        self.over = False
        """Set before the task is cancelled: `asyncio.wait_for` of Python 3.11 drops a cancellation that comes as the
        answer does."""

    def begin(self, seconds: float) -> JobWatch:
        """Look at every interval from now on, beside whatever else goes on; returns this."""
        self.task = asyncio.create_task(self.run(seconds))
        return self

    def end(self) -> None:
        """Look no more; the task ends soon."""
        self.over = True
        self.task.cancel()

    async def run(self, seconds: float) -> None:
        """Look at every interval, until it is over. A look that fails is ignored: others report a lost connection."""
        asked = -ESTIMATE_SECONDS
        clock = asyncio.get_running_loop().time
        while not self.over:
            await asyncio.sleep(seconds)
            with suppress(Exception):
                if not self.waits():
                    await self.look()
                elif self.estimate is not None and clock() - asked >= ESTIMATE_SECONDS:
                    asked = clock()
                    await self.estimate()

    async def look(self) -> None:
        """Read the file once; emit an event where it changed."""
        text = await self.ask(command(self.directory))
        try:
            found = read_progress(text) if text else None
        except ManifestError:
            return
        if found is None or found == self.last or self.waits():  # requeued since it was asked: of its last run
            return
        self.last = found
        emit(
            "progress",
            step=self.step,
            stage=found.stage,
            done=found.step,
            steps=found.steps,
            loss=found.loss,
            tokens_per_second=found.tokens_per_second,
            seconds_left=found.seconds_left,
        )


@asynccontextmanager
async def run_watch(watch: JobWatch):
    """Run `watch` beside the block, if progress is followed."""
    seconds = look_interval()
    if seconds:
        watch.begin(seconds)
    try:
        yield watch
    finally:
        if seconds:
            watch.end()
            with suppress(asyncio.CancelledError):
                await watch.task
