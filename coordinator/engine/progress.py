"""What StreamFlow's log says of a federation's progress: a small state machine over its lines."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.engine.queues import facility_of

EXECUTING = re.compile(r"EXECUTING step (/\S+) \(job \S+\)")
SCHEDULED = re.compile(r"Scheduled job (/\S+)/[\d.]+ with job id (\S+)")
STARTING = re.compile(r"round (\d+): starting from")
COMPLETE = re.compile(r"round (\d+) is complete: (.*)")
AGAIN = re.compile(r"round (\d+) is asked for again .*")
SOUND = re.compile(r"update of (\S+) for round \d+ is sound")
WITHOUT = re.compile(r"round \d+ goes on without (\S+): (.*)")
FAILED_START = re.compile(r"FAILED Job /start/")
PROBLEM = re.compile(r"\b(ERROR|FAILED|CRITICAL)\b")


@dataclass
class Progress:
    """State of a run, fed line by line. `clock` gives seconds."""

    facilities: list[str]
    rounds: int
    clock: Callable[[], float] = time.monotonic
    round: int | None = None
    """Round under way; equal to `rounds` during the final evaluation."""
    step: str = "starting"
    """What the coordinator does."""
    states: dict[str, str] = field(default_factory=dict)
    """By facility: waiting, queued, training, receiving, done, or why it is out."""
    since: dict[str, float] = field(default_factory=dict)
    """When each facility's state began."""
    problems: list[str] = field(default_factory=list)
    fatal: str = ""
    """Why the first step refused to begin: trying again cannot mend it."""
    _start_failed: bool = False

    def __post_init__(self) -> None:
        for name in self.facilities:
            self._set(name, "waiting")

    def feed(self, line: str) -> str | None:
        """Take one log line; returns a sentence when it means something to a person."""
        if self._start_failed and not self.fatal and line.lstrip().startswith("error: "):
            self.fatal = line.strip().removeprefix("error: ")
            return self.fatal
        self._start_failed |= FAILED_START.search(line) is not None
        if match := EXECUTING.search(line):
            return self._executing(match[1])
        if match := SCHEDULED.search(line):
            name = facility_of(match[1])
            if name in self.states:
                self._set(name, f"queued as job {match[2]}")
                return f"{self.title}: {name} queued as job {match[2]}"
        if match := STARTING.search(line):
            self.round = int(match[1])
            return None
        if match := SOUND.search(line):
            self._set(match[1], "done")
            return f"{self.title}: {match[1]} done"
        if match := WITHOUT.search(line):
            self._set(match[1], f"out: {match[2]}")
            return f"{self.title}: goes on without {match[1]}: {match[2]}"
        if match := COMPLETE.search(line):
            title, self.round, self.step = self.title, int(match[1]) + 1, "between rounds"
            return f"{title}: complete, {match[2]}"
        if AGAIN.search(line):
            return line.split(maxsplit=3)[-1] if " INFO " in line else line
        if PROBLEM.search(line):
            self.problems.append(line)
            return line
        return None

    @property
    def heading(self) -> str:
        """How far all of it is."""
        return f"{self.title} of {self.rounds}"

    @property
    def title(self) -> str:
        if self.round is None:
            return "before the first round"
        return "final evaluation" if self.round >= self.rounds else f"round {self.round}"

    def _executing(self, step: str) -> str | None:
        leaf = step.rpartition("/")[2]
        kind, _, name = leaf.partition("_")
        if name in self.states and kind in ("send", "train", "receive"):
            at_work = "evaluating" if (self.round or 0) >= self.rounds else "training"
            doing = {"send": "sending", "receive": "receiving"}.get(kind, at_work)
            self._set(name, doing)
            return f"{self.title}: {name} {doing}"
        self.step = {"start": "looking at the archive", "aggregate": "averaging", "report": "reporting"}.get(leaf, leaf)
        return f"{self.title}: {self.step}" if leaf == "aggregate" else None

    def _set(self, name: str, state: str) -> None:
        self.states[name] = state
        self.since[name] = self.clock()
