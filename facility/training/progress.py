"""Progress of a round: a log line and `progress.json` in the job's directory, at most once a second.

`progress.json` is `facility.exchange.messages.progress.JobProgress`; it is replaced atomically.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

from facility.exchange.messages.progress import JobProgress, ProgressFile, Stage, write_progress
from facility.training.engine import StepResult
from facility.training.processes.ranks import Ranks

log = logging.getLogger(__name__)
SECONDS = 1.0
"""Between two reports at least, unless every step is asked for."""


def show_stage(ranks: Ranks, directory: Path, stage: Stage, *, done: int = 0, steps: int = 0) -> None:
    """Replace `progress.json` as a stage begins; the first rank's business alone."""
    if ranks.first:
        write_progress(directory, JobProgress(stage=stage, step=done, steps=steps, time=round(time.time(), 3)))


class Progress:
    """One rank's account of its steps."""

    def __init__(self, directory: Path, *, steps: int, step_tokens: int, always: bool) -> None:
        """`steps` of the round; `always`: log each."""
        self.always, self.steps, self.step_tokens = always, steps, step_tokens
        self._file = ProgressFile(directory)
        self._first, self._last = (0, math.nan), -math.inf
        """Number and end of the first step since this start: it also compiles, allocates and warms caches up, and says
        nothing of how long the others take."""

    def step(self, done: int, result: StepResult) -> None:
        """Report step number `done`, counted from 1."""
        now = time.monotonic()
        if not self._first[0]:
            self._first = done, now
        due = done == self.steps or now - self._last >= SECONDS
        if not (self.always or due):
            return
        loss = "withheld" if math.isnan(result.loss) else f"{result.loss:.4f}"
        log.info(
            "step %d/%d  loss %s  gradient norm %.3f  learning rate %.2e",
            done,
            self.steps,
            loss,
            result.gradient_norm,
            result.rate,
        )
        if due:
            self._last = now
            self._write(done, result.loss, now)

    def _write(self, done: int, loss: float, now: float) -> None:
        """Speed and time left are known from the second step on."""
        steps, seconds = done - self._first[0], now - self._first[1]
        speed = steps / seconds if steps > 0 and seconds > 0 else 0.0
        message = JobProgress(
            stage="training",
            step=done,
            steps=self.steps,
            loss=loss if math.isfinite(loss) else None,
            tokens_per_second=round(speed * self.step_tokens, 3),
            seconds_left=round(max(0, self.steps - done) / speed, 3) if speed else None,
            time=round(time.time(), 3),
        )
        self._file.write(message)
