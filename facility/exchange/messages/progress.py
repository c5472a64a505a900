"""`progress.json`: how far a facility's job is.

The trainer replaces it in the job's directory, the coordinator reads it over the connection that it has anyway.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from facility.exchange.messages.plausible import MOST_COUNT, MOST_LOSS
from facility.exchange.messages.strict_json import Fields, parse_json

log = logging.getLogger(__name__)

FILE = "progress.json"
MOST_BYTES = 4096
"""What is read of the file."""
MOST_STEPS = 10**9
MOST_SECONDS = 1e9
STAGES = ("waiting", "loading", "evaluating", "training", "saving")
Stage = Literal["waiting", "loading", "evaluating", "training", "saving"]
"""`waiting`: for the end of an earlier job of the same round."""


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """What a job says of itself while it runs."""

    stage: Stage = "training"
    step: int = 0
    """Optimizer steps done."""
    steps: int = 0
    """Of the round; 0: not known yet."""
    loss: float | None = None
    """Of the latest step, nats per prediction."""
    tokens_per_second: float = 0.0
    seconds_left: float | None = None
    """Until the last step, at the speed of the steps since the first; None: not known."""
    time: float = 0.0
    """Of the latest change on the facility's clock, seconds since 1970."""


NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
"""A coordinator may write where a job runs: a link there leads nowhere."""


class ProgressFile:
    """`progress.json` in a job's directory, which each report replaces atomically.

    A full disk must not end the round: where the file cannot be written a warning says so, once, and another line says
    when it can be again. It is not synchronised to the disk: steps may be quick, and after a crash it is not read.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / FILE
        self._writable = True

    def write(self, message: JobProgress) -> bool:
        """Replace the file; False where it cannot be written."""
        temporary = self._file.with_name(f".{FILE}.{os.getpid()}")
        try:
            with os.fdopen(os.open(temporary, NEW, 0o644), "w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(message)) + "\n")
            temporary.replace(self._file)
        except OSError as error:
            if self._writable:
                log.warning("%s cannot be written: %s; training goes on, and each step tries again", self._file, error)
            self._writable = False
            return False
        if not self._writable:
            log.warning("%s can be written again", self._file)
        self._writable = True
        return True


def write_progress(directory: Path, message: JobProgress) -> bool:
    """Replace `progress.json` in `directory` once; False, with a warning, where it cannot be written."""
    return ProgressFile(directory).write(message)


def read_progress(text: str) -> JobProgress:
    """The message in a file's text. Raises `ManifestError` where it is malformed or holds impossible values."""
    found = Fields(raw=parse_json(text[:MOST_BYTES], where=FILE), where=FILE).only_of(JobProgress)

    def optional(name: str, most: float) -> float | None:
        return None if found.raw.get(name) is None else found.number(name, least=-most, most=most)

    return JobProgress(
        stage=found.one_of("stage", "training", STAGES),
        step=found.whole("step", 0, most=MOST_STEPS),
        steps=found.whole("steps", 0, most=MOST_STEPS),
        loss=optional("loss", MOST_LOSS),
        tokens_per_second=found.number("tokens_per_second", 0.0, most=MOST_COUNT),
        seconds_left=optional("seconds_left", MOST_SECONDS),
        time=found.number("time", 0.0),
    )
