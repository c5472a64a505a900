"""What StreamFlow's log says of a federation by groups: the same lines, where every facility has a round of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass

from coordinator.engine.progress import Progress

GROUP = re.compile(r"(group (\d+) \(.*\): .*) -> ")
GOES_ON = re.compile(r"facility (\S+) (?:goes on|ends): .*")


@dataclass
class GroupProgress(Progress):
    """State of a run, fed line by line."""

    groups: int = 0
    """Groups carried out."""

    def feed(self, line: str) -> str | None:
        """Take one log line; returns a sentence when it means something to a person."""
        if match := GROUP.search(line):
            self.groups += 1
            return match[1]
        if match := GOES_ON.search(line):
            if " ends: " in match[0]:
                self._set(match[1], match[0].partition(" ends: ")[2])
            return match[0]
        return super().feed(line)

    @property
    def heading(self) -> str:
        return f"{self.groups} groups, {self.rounds} rounds each"

    @property
    def title(self) -> str:
        return f"{self.groups} groups"

    def _executing(self, step: str) -> str | None:
        chain, _, leaf = step.strip("/").rpartition("/")
        name = chain.partition("_")[2]
        if name in self.states and leaf in ("train", "receive", "meet"):
            doing = {"train": "training", "receive": "receiving", "meet": "waiting for its group"}[leaf]
            self._set(name, doing)
            return f"{name} {doing}"
        return super()._executing(step)
