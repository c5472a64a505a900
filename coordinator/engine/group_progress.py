"""How far a federation by groups is: the same events, where every facility has a round of its own."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.engine.progress import Progress
from coordinator.events.event import Event


@dataclass
class GroupProgress(Progress):
    """State of a run, fed event by event."""

    groups: int = 0
    """Groups carried out."""

    @property
    def heading(self) -> str:
        return f"{self.groups} groups, {self.rounds} rounds each"

    @property
    def title(self) -> str:
        return f"{self.groups} groups"

    def _on_group(self, event: Event) -> str:
        self.groups += 1
        return str(event["text"]).partition(" -> ")[0]

    def _on_goes_on(self, event: Event) -> str:
        return f"facility {event['facility']} goes on: {event['reason']}"

    def _on_ends(self, event: Event) -> str:
        self._set(event["facility"], event["reason"])
        return f"facility {event['facility']} ends: {event['reason']}"

    def _on_executing(self, event: Event) -> str | None:
        chain, _, leaf = str(event["step"]).strip("/").rpartition("/")
        name = chain.partition("_")[2]
        if name in self.states and leaf in ("train", "receive", "meet"):
            doing = {"train": "training", "receive": "receiving", "meet": "waiting for its group"}[leaf]
            self._set(name, doing)
            return f"{name} {doing}"
        return super()._on_executing(event)
