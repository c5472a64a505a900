"""How far jobs are in truth, read from the facilities' own disks, beside what the coordinator hears over ssh."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.events.event import Event
from coordinator.testbed.layout import Testbed
from facility.exchange.errors import ManifestError
from facility.exchange.messages.progress import FILE, read_progress

State = tuple[str, int]
"""Stage, and steps done."""
LOOK_SECONDS = 0.2


@dataclass
class Life:
    """Both accounts, by the same clock: this machine's."""

    testbed: Testbed
    truth: dict[Path, list[tuple[float, State]]] = field(default_factory=dict)
    """By job, since when its progress file said what."""
    ends: dict[Path, float] = field(default_factory=dict)
    """By job, when its file last changed."""
    heard: dict[str, list[tuple[float, State]]] = field(default_factory=dict)
    """By facility, when the coordinator was told what."""

    def on_event(self, event: Event) -> None:
        """An event of the run, as its supervisor gets it."""
        if event.kind == "progress":
            facility = str(event["step"]).rpartition("train_")[2]
            self.heard.setdefault(facility, []).append((time.time(), (event["stage"], event["done"])))

    def watch(self, stop: threading.Event) -> None:
        """Read the files on the facilities' disks until told to stop."""
        while not stop.wait(LOOK_SECONDS):
            for site in self.testbed.sites:
                for path in (site.home / "work").glob(f"**/{FILE}"):
                    try:
                        told = read_progress(path.read_text())
                    except (OSError, ManifestError):
                        continue
                    states = self.truth.setdefault(path, [])
                    if not states or states[-1][1] != (told.stage, told.step):
                        states.append((time.time(), (told.stage, told.step)))
                        self.ends[path] = time.time()

    def lags(self, within: float) -> list[float]:
        """Seconds until the coordinator knew of a state or of a later one of the same job, for each state that was
        followed by another at least `within` seconds later: jobs that end are no longer looked at."""
        found = []
        for path, states in self.truth.items():
            site = next(one for one in self.testbed.sites if path.is_relative_to(one.home))
            for place, (since, _) in enumerate(states):
                if self.ends[path] - since < within:
                    continue
                later = {state: when for when, state in states[place:]}
                told = [
                    when - since
                    for when, state in self.heard.get(site.name, [])
                    if state in later and later[state] - LOOK_SECONDS <= when <= self.ends[path] + within
                ]
                found.append(min(told, default=float("inf")))
        return found
