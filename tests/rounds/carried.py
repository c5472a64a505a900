"""A federation in this process whose updates arrive in a round of one's choice: real steps, no engine and no jobs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.archive.rounds import CARRIED, Archive, FacilityRow
from coordinator.config.settings import CoordinatorSettings
from coordinator.steps.aggregate import close_round
from coordinator.steps.arrived import CollectedRound, sort_out
from coordinator.steps.expectation import Earlier, Expected
from coordinator.steps.receive import receive
from coordinator.steps.start import start
from facility.exchange.files.durable import new_directory
from facility.exchange.files.links import link_tree
from facility.exchange.messages import report
from tests.aggregation.updates import write_update

Write = Callable[..., Path]
"""As `tests.aggregation.updates.write_update`."""


@dataclass
class Carried:
    """Facilities' jobs by the round that they are of; `close` averages those that are said to arrive."""

    root: Path
    settings: CoordinatorSettings
    write: Write = write_update
    number: int = 0
    proceed: bool = True
    late: str = CARRIED
    """Why facilities whose jobs do not arrive are not in the round."""
    at_work: dict[str, int] = field(default_factory=dict)
    """By facility: the round from whose model its job trains."""

    def __post_init__(self) -> None:
        self.archive = Archive(self.root / "archive")

    def begin(self, model: Path) -> Carried:
        self.model, self.number, self.proceed = start(self.archive, model, self.settings)
        return self

    def update_of(self, name: str) -> Path:
        """Where a facility's job of its round leaves what it has trained."""
        return self.root / "jobs" / f"{name}-{self.at_work[name]}"

    def open(self) -> None:
        """Facilities without a job begin one from the newest model."""
        for name in self.settings.facilities:
            self.at_work.setdefault(name, self.number)

    def close(self, arriving: Iterable[str], options: Mapping[str, Mapping[str, object]] | None = None) -> None:
        """Receive what these facilities' jobs left, and average it with the others late."""
        self.open()
        received = [self.receive(name, name in arriving, (options or {}).get(name, {})) for name in self.names]
        arrived = sort_out(received, self.settings.facilities, self.number)
        for name in arriving:
            del self.at_work[name]
        self.model, self.number, self.proceed = close_round(
            CollectedRound(
                archive=self.archive, settings=self.settings, model=self.model, number=self.number, arrived=arrived
            )
        )

    @property
    def names(self) -> list[str]:
        return list(self.settings.facilities)

    def receive(self, name: str, arrives: bool, options: Mapping[str, object] | None = None) -> Path:
        """What the receive step hands on: a sound update, or the failure alone."""
        out = self.root / "received" / f"{self.number}-{name}"
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(exist_ok=True)
        decoded = out.with_name(f".{out.name}.decoded")
        update = self.update_of(name) if arrives else None
        if update is not None and not update.exists():
            started = self.archive.model_for(self.at_work[name])
            self.write(update, started, name, round=self.at_work[name], **(options or {}))
        failure = receive(
            update,
            Expected(
                facility=name,
                round=self.number,
                model=self.model,
                evaluation=self.number >= self.settings.rounds,
                settings=self.settings.aggregation,
                adapters=self.settings.lora,
                earlier=Earlier(archive=self.archive, facility=name, seed=self.settings.seed),
            ),
            decoded=decoded,
            late=self.late,
        )
        if failure is None:
            assert update is not None
            link_tree(decoded if decoded.exists() else update, out)
        else:
            with new_directory(out) as temporary:
                report.write(temporary, failure)
        shutil.rmtree(decoded, ignore_errors=True)
        return out

    def rows(self) -> list[FacilityRow]:
        return [row for entry in self.archive.history() for row in entry.facilities]

    def used(self, name: str) -> list[int]:
        """Rounds whose update of a facility was averaged, in the order in which they were."""
        return [row.round - row.staleness for row in self.rows() if row.facility == name and row.status == "ok"]
