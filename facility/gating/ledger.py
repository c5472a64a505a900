"""What the gate remembers between requests: the jobs that it submitted, and the bytes that it let out and in."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from facility.exchange.files.durable import write_json
from facility.exchange.files.locks import take_lock

DAY = 86_400.0
RESERVED = "reserved-"
"""Begins the id of a job that the scheduler has not named yet."""
RESERVED_SECONDS = 600.0
"""Longer than any submission takes."""
KEPT = 400
"""Jobs that are remembered beside those that still count, and as many refused ones; older ones' updates cannot be
read any more. A job whose directory is still there is remembered as well: what it printed is not to be read."""


@dataclass(kw_only=True)
class JobEntry:
    """One job that came through the gate, or was refused."""

    id: str
    """The scheduler's; '' for a refused one."""
    name: str
    directory: str
    """Its update and its progress are read from here."""
    submitted: float
    """Seconds since 1970."""
    nodes: int = 1
    hours: float = 0.0
    """Its time limit."""
    ended: float = 0.0
    """When it was first seen to have left the queue; 0: not yet."""
    run: str = ""
    """Run of the federation that it trained for."""
    waited_in: str = ""
    """Directory of the gate's own in which it waits, or waited, for its round; '': it was submitted with one."""
    reads: list[str] = field(default_factory=list)
    """Paths of its round's model: no request alters them before it has ended."""

    @property
    def waits(self) -> bool:
        """It has no round, and may still be given one."""
        return bool(self.waited_in) and self.directory == self.waited_in and not self.ended

    def unnamed(self, name: str) -> bool:
        """It has this name, and the scheduler's id of it is not known yet."""
        return self.name == name and self.id.startswith(RESERVED) and not self.ended

    @property
    def node_hours(self) -> float:
        """What it uses at most, as far as is known."""
        if self.ended < self.submitted:  # it has not ended, or the clock was set back and nothing is known
            return self.nodes * self.hours
        return self.nodes * min(self.hours, (self.ended - self.submitted) / 3600)


@dataclass(kw_only=True)
class Ledger:
    """The file's content."""

    jobs: list[JobEntry] = field(default_factory=list)
    out: dict[str, int] = field(default_factory=dict)
    """Bytes that left, by hour since 1970."""
    into: dict[str, int] = field(default_factory=dict)
    """Bytes that came in, likewise."""
    runs: list[str] = field(default_factory=list)
    """`federation/run` of the runs that began here with an allowed model."""
    settings: list[str] = field(default_factory=list)
    """Digests of the settings that a signed order named."""
    commands: dict[str, int] = field(default_factory=dict)
    """Commands run outside of the queue, by hour since 1970."""

    def node_hours(self, now: float) -> float:
        return sum(job.node_hours for job in self.jobs if job.id and now - job.submitted < DAY)

    def bytes_out(self, now: float) -> int:
        return sum(of_a_day(self.out, now).values())

    def let_out(self, count: int, now: float) -> None:
        self.out = counted(self.out, count, now)

    def bytes_in(self, now: float) -> int:
        return sum(of_a_day(self.into, now).values())

    def let_in(self, count: int, now: float) -> None:
        self.into = counted(self.into, count, now)

    def count_command(self, now: float) -> int:
        """Count one command; returns how many there were within 24 hours, it included."""
        self.commands = counted(self.commands, 1, now)
        return sum(self.commands.values())

    def job(self, id: str) -> JobEntry | None:
        return next((job for job in reversed(self.jobs) if job.id and job.id == id), None)

    def waiting(self, name: str, now: float) -> JobEntry | None:
        """The job of this name that waits for its round. One that the scheduler never named was never submitted."""
        return next(
            (
                job
                for job in self.jobs
                if job.name == name
                and job.waits
                and not (job.id.startswith(RESERVED) and now - job.submitted > RESERVED_SECONDS)
            ),
            None,
        )

    def settle(self, now: float) -> None:
        """What is entered for later than now, by a clock that was ahead and was set back, is entered for now.

        It counts for a day, neither until that later time has come nor not at all.
        """
        for job in self.jobs:
            if (ahead := job.submitted - now) > 0:
                job.submitted, job.ended = now, max(0.0, job.ended - ahead)
        self.out, self.into, self.commands = (settled(one, now) for one in (self.out, self.into, self.commands))

    def forget(self, now: float) -> None:
        """Drop what is oldest. What counts stays, however many requests were refused since."""
        others = [job for job in self.jobs if not self._counts(job, now)]
        dropped: set[int] = set()
        for kind in ([job for job in others if job.id], [job for job in others if not job.id]):
            old = kind[: max(0, len(kind) - KEPT)]
            dropped |= {id(job) for job in old if not (job.id and os.path.lexists(job.directory))}
        self.jobs = [job for job in self.jobs if id(job) not in dropped]
        self.runs, self.settings = self.runs[-KEPT:], self.settings[-KEPT:]

    def _counts(self, job: JobEntry, now: float) -> bool:
        """It counts for the day's node-hours, waits for its round, or is under way and reads a model."""
        return bool(job.id) and (now - job.submitted < DAY or not job.ended)

    def note_ended(self, name: str, known: Collection[str], active: Collection[str], now: float) -> None:
        """Jobs of this name that are in no queue any more have ended by now.

        `known`: ids of before the queue was asked; a job that another gate has submitted meanwhile is in no answer.
        """
        for job in self.jobs:
            if job.id in known and job.id not in active and job.name == name and not job.ended:
                job.ended = now

    def note_killed(self, name: str, now: float) -> None:
        """Nothing of this name is there: what gates that were killed had entered for it has ended by now."""
        for job in self.jobs:
            begun = job.id.startswith(RESERVED) and now - job.submitted > RESERVED_SECONDS
            if job.name == name and begun and not job.ended:
                job.ended = now


def hour_of(now: float) -> str:
    """The key of an hour's count."""
    return str(int(now // 3600))


def settled(hours: dict[str, int], now: float) -> dict[str, int]:
    """Counts by hour, in which those of later hours are of this one."""
    here, known = int(now // 3600), {int(hour): count for hour, count in hours.items()}
    if not (later := [hour for hour in known if hour > here]):
        return hours
    return {str(hour): count for hour, count in known.items() if hour < here} | {
        str(here): sum(known[hour] for hour in [*later, here] if hour in known)
    }


def of_a_day(hours: dict[str, int], now: float) -> dict[str, int]:
    """Counts by hour without those that are older than a day."""
    return {hour: count for hour, count in hours.items() if int(hour) * 3600 + 3600 > now - DAY}


def counted(hours: dict[str, int], count: int, now: float) -> dict[str, int]:
    """Counts by hour with `count` more, without those that are older than a day."""
    recent, hour = of_a_day(hours, now), hour_of(now)
    return recent | {hour: recent.get(hour, 0) + count}


def read_ledger(path: Path) -> Ledger:
    """Raises `ValueError` for a damaged file: then nothing is granted."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Ledger()
    return Ledger(
        jobs=[JobEntry(**job) for job in raw["jobs"]],
        out=dict(raw["out"]),
        into=dict(raw.get("into", {})),
        runs=list(raw["runs"]),
        settings=list(raw.get("settings", [])),
        commands=dict(raw.get("commands", {})),
    )


@contextmanager
def ledger_locked(path: Path, clock: Callable[[], float] = time.time) -> Iterator[tuple[Ledger, float]]:
    """The ledger, for one request alone, and the time; written when the body ends, also by an exception."""
    path = Path(path)
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        take_lock(lock, path)
        ledger = read_ledger(path)
        ledger.settle(clock())
        try:
            yield ledger, clock()
        finally:
            ledger.forget(clock())
            write_json(path, asdict(ledger))
    finally:
        os.close(lock)
