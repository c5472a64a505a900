"""What each facility did when: segments of time from the archive's events, for the report's timeline."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.archive.journal import Entry

KINDS: Mapping[str, str] = {
    "queue": "the job waits in its queue",
    "ahead": "a job that began ahead of its model waits for it",
    "load": "the job starts and loads model and data",
    "train": "optimizer steps",
    "evaluate": "evaluation of the received and the returned model",
    "save": "update and state are written",
    "transfer": "model or update on its way",
    "wait": "done, waiting for the other facilities and for aggregation; or waiting for an earlier job of the round",
    "login": "the facility refuses the login",
    "lost": "work of a job whose update did not enter the round",
}
"""Kind of segment and its meaning; what no segment covers is idle."""
STAGES: Mapping[str, str] = {
    "waiting": "wait",
    "loading": "load",
    "evaluating": "evaluate",
    "training": "train",
    "saving": "save",
}
"""Kind of segment of each stage that a job reports."""
ORDER = ("load", "train", "evaluate", "save")

Phases = Mapping[tuple[int, str], Mapping[str, float]]
"""Seconds by phase of the job of a round and facility, as it reports itself."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One span of one facility's time."""

    facility: str
    kind: str
    """Key of `KINDS`."""
    begin: float
    """Seconds since 1970."""
    end: float
    round: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def segments(entries: Iterable[Entry], phases: Phases) -> list[Segment]:
    """All facilities' segments in order of time; what is open at the last entry ends there."""
    lanes: dict[str, _Lane] = {}
    limits: Mapping[str, float] = {}
    last = 0.0
    for entry in entries:
        last = max(last, entry.time)
        if entry.kind == "rewound":
            for lane in lanes.values():
                lane.set_aside(entry.round or 0)
        elif entry.kind in ("averaged", "run_ended", "run_started"):
            for name, lane in lanes.items():
                lane.close(entry.time, lost=entry.kind != "averaged", limit=limits.get(name, math.inf))
            if entry.kind == "run_started":
                limits = entry.detail.get("limits", {})
        elif entry.facility:
            lanes.setdefault(entry.facility, _Lane(entry.facility, phases)).take(entry)
    for lane in lanes.values():
        lane.give_up()
        lane.late = False
        lane.close(last, lost=False)
    return sorted((one for lane in lanes.values() for one in lane.found), key=lambda one: (one.begin, one.facility))


class _Lane:
    """One facility's time, fed entry by entry."""

    def __init__(self, facility: str, phases: Phases) -> None:
        self.facility, self.phases = facility, phases
        self.found: list[Segment] = []
        self.queued: float | None = None
        self.started: float | None = None
        self.waits: float | None = None
        self.refused_login: float | None = None
        self.late = False
        """The job at work is of a round that has closed."""
        self.killed: float | None = None
        """When the run ended while the job was running; later events say what became of the job."""
        self.round: int | None = None
        self.marks: list[tuple[float, str]] = []

    def take(self, entry: Entry) -> None:
        now, seconds = entry.time, float(entry.detail.get("seconds", 0.0))
        if entry.round is not None:
            self.round = entry.round
        match entry.kind:
            case "queued":
                self.give_up()
                self.queued, self.waits = now, None
            case "waited":
                self._wait_in_job(now - seconds, now)
            case "started":
                self.give_up()
                self._leave_queue(now)
                self.started, self.marks, self.waits, self.late = now, [], None, False
            case "requeued" if self.started is not None:
                self.found += self._parts(self.started, now, {})
                self.started, self.queued, self.marks = None, now, []
            case "late":
                self.late = True
            case "verified" if self.started is not None:  # an earlier run's job, whose end nobody saw
                self._end_job(min(now, self.started + (sum(self._told().values()) or now)))
            case "stage":
                self.marks.append((now, STAGES.get(str(entry.detail.get("stage")), "train")))
            case "trained":
                self._end_job(now)
                self.waits = now
            case "sent":
                self._add("transfer", now - seconds, now)
            case "transferred":
                if self.waits is not None:
                    self._add("wait", self.waits, now - seconds)
                self._add("transfer", now - seconds, now)
                self.waits = now
            case "refused":
                self.give_up()
                self._lose(lambda number: number == entry.round)
            case "login_refused":
                self.refused_login = now
            case "login_works" if self.refused_login is not None:
                self._add("login", self.refused_login, now)
                self.refused_login = None

    def close(self, now: float, *, lost: bool, limit: float = math.inf) -> None:
        """A round or a run ends: whatever is open ends with it. `limit`: seconds that a job may take; of a run that
        was killed, the next one's begin is the first that is heard."""
        if self.queued is not None and not self.late:
            self._leave_queue(now)
        if self.started is not None:
            if lost and self.killed is None:
                self.killed = min(now, self.started + limit)
            elif not (lost or self.late or self.killed is not None):
                self._end_job(now)
        if self.waits is not None:
            self._add("wait", self.waits, now)
        self.waits = None

    def set_aside(self, first: int) -> None:
        """Rounds from `first` on are made again: what was done for them is in no model."""
        self._lose(lambda number: number is not None and number >= first)

    def _lose(self, of: Callable[[int | None], bool]) -> None:
        """Work of the rounds in question is lost."""
        self.found = [_as_lost(one) if one.kind in ORDER and of(one.round) else one for one in self.found]

    def give_up(self) -> None:
        """The job that was at work when the run ended has left nothing."""
        if self.killed is not None and self.started is not None:
            self._add("lost", self.started, self.killed)
            self.started = None
        self.killed = None

    def _wait_in_job(self, begin: float, end: float) -> None:
        """The wait of a job for its model takes the place of the facility's wait, and of nothing else."""
        if self.waits is not None:
            self._add("wait", self.waits, end)
            self.waits = end
        begin = max([begin, *(one.end for one in self.found if one.kind != "wait")])
        ends = [(one, min(one.end, begin) if one.kind == "wait" else one.end) for one in self.found]
        self.found = [replace(one, end=at) for one, at in ends if at > one.begin]
        self._add("ahead", begin, end if self.started is None else min(end, self.started))

    def _leave_queue(self, now: float) -> None:
        if self.queued is not None:
            self._add("queue", self.queued, now)
            self.queued = None

    def _end_job(self, now: float) -> None:
        phases, self.late, self.killed = self._told(), False, None
        begin = self.started
        if begin is None:  # never seen running: it was so short that the scheduler was not asked meanwhile
            queued = now if self.queued is None else self.queued
            begin = max(queued, now - sum(phases.values())) if phases else now
            self._leave_queue(begin)
        self.found += self._parts(begin, now, phases)
        self.started = None

    def _told(self) -> Mapping[str, float]:
        """What the job reports of itself, in the round that has its update."""
        return self.phases.get((-1 if self.round is None else self.round, self.facility), {})

    def _parts(self, begin: float, end: float, phases: Mapping[str, float]) -> list[Segment]:
        """A job's time by stage: as observed, else as it reported itself."""
        cuts = [(begin, "load"), *self.marks]
        if not self.marks and (known := sum(phases.values())) > 0:
            scale = min(1.0, (end - begin) / known)
            moment = end - known * scale
            for name in ORDER:
                cuts.append((moment, name))
                moment += phases.get(name, 0.0) * scale
        elif not self.marks:
            cuts = [(begin, "train")]
        ends = [moment for moment, _ in cuts[1:]] + [end]
        spans = [(kind, at, until) for (at, kind), until in zip(cuts, ends, strict=True) if until > at]
        return [
            Segment(facility=self.facility, kind=kind, begin=at, end=until, round=self.round)
            for kind, at, until in spans
        ]

    def _add(self, kind: str, begin: float, end: float) -> None:
        if end > begin:
            self.found.append(Segment(facility=self.facility, kind=kind, begin=begin, end=end, round=self.round))


def _as_lost(one: Segment) -> Segment:
    return Segment(facility=one.facility, kind="lost", begin=one.begin, end=one.end, round=one.round)


def totals(found: Sequence[Segment], facilities: Sequence[str]) -> dict[str, dict[str, float]]:
    """Seconds by facility and kind, and `idle`: what no segment covers of the time between the first and the last."""
    if not found:
        return {}
    begin, end = min(one.begin for one in found), max(one.end for one in found)
    by_name: dict[str, list[Segment]] = defaultdict(list)
    for one in found:
        by_name[one.facility].append(one)
    result: dict[str, dict[str, float]] = {}
    for name in facilities:
        own = by_name[name]
        sums: dict[str, float] = defaultdict(float)
        for one in own:
            sums[one.kind] += one.seconds
        covered, reached = 0.0, begin
        for one in sorted(own, key=lambda one: one.begin):
            covered += max(0.0, one.end - max(one.begin, reached))
            reached = max(reached, one.end)
        result[name] = {kind: round(sums[kind], 3) for kind in KINDS if sums[kind]}
        result[name]["idle"] = round(max(0.0, end - begin - covered), 3)
    return result
