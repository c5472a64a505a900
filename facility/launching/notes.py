"""Small files by which the tasks of one job communicate, in a directory that all its nodes see.

No message goes over the network: the job's working directory is on the file system that the ranks write the update
to; behind a gate, one of the gate's own, which no request can write. Each note appears whole (rename); readers list the
directory every half second, and open what is there.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from facility.exchange.errors import TransientError
from facility.exchange.files.durable import write_text
from facility.exchange.files.listing import names_in
from facility.exchange.json_values import note_in

LOOK_SECONDS = 0.5
PLACE = "CROSSFED_NOTES"
"""Environment variable: where the notes of a gate's job are, for its directory is the coordinator's to write."""


class Notes:
    """The notes of one start of one job; another start of the same job (a requeue) has others."""

    def __init__(self, directory: Path, job: str, attempt: str = "0") -> None:
        word = re.sub(r"[^A-Za-z0-9]", "-", f"{job or os.getpid()}-{attempt}")
        self.directory = Path(directory).absolute() / f".launch-{word}"
        self._begun = False  # whether any task has made the directory

    def write(self, name: str, value: Any) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        write_text(self.directory / f"{name}.json", json.dumps(value))

    def read(self, name: str) -> Any:
        """The note, or None."""
        return self.read_all([name])[0]

    def read_all(self, names: Sequence[str]) -> list[Any]:
        """The notes, None in the place of one that is not there."""
        files = [self.directory / f"{name}.json" for name in names]
        there = self._names()
        return [note_in(file) if file.name in there else None for file in files]

    def _names(self) -> set[str]:
        self._begun = self._begun or self.directory.name in names_in(self.directory.parent)
        return names_in(self.directory) if self._begun else set()

    def failures(self) -> list[dict[str, Any]]:
        """Reports of failing ranks by all tasks, earliest first."""
        found = [note_in(self.directory / name) for name in self._names() if name.startswith("failed-")]
        notes = [note for note in found if isinstance(note, dict)]
        return sorted(notes, key=lambda note: note.get("time", 0.0))

    def wait_for(self, name: str, seconds: float, whose: str) -> Any:
        """Wait until a note is there. Raises `TransientError` after `seconds`."""
        return self.wait(lambda: self.read(name), seconds, f"{whose} did not write {self.directory / name}.json")

    def gather(self, tasks: int, task: int, value: Any, seconds: float) -> list[Any]:
        """Write `value` and wait for every task's. Raises `TransientError` after `seconds`."""
        self.write(f"task-{task}", value)

        def all_values() -> list[Any] | None:
            values = self.read_all([f"task-{number}" for number in range(tasks)])
            return None if any(v is None for v in values) else values

        return self.wait(all_values, seconds, f"not all of {tasks} tasks wrote their notes in {self.directory}")

    def wait(self, look: Callable[[], Any], seconds: float, otherwise: str) -> Any:
        deadline = time.monotonic() + seconds
        while (value := look()) is None:
            if time.monotonic() > deadline:
                raise TransientError(
                    f"{otherwise} within {seconds:.0f} s: did every node start, and do all see this directory?"
                )
            time.sleep(LOOK_SECONDS)
        return value
