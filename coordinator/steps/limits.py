"""When a federation has no time or no node-hours left for another round: a pure function of its rounds so far.

The next round is expected to take the median of the last `WINDOW` rounds. The first is always begun: nothing is known
of it. A round is not begun where it, and the final evaluation after it, are expected to take more than is left.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.archive.journal import Entry, Journal, waited_node_seconds, without_rewound
from coordinator.archive.rewind import rounds_set_aside
from coordinator.archive.rounds import Archive, FacilityRow, RoundFile
from coordinator.config.closing import LimitSettings
from coordinator.config.settings import CoordinatorSettings
from coordinator.durations import format_duration

Jobs = Mapping[tuple[int, str], float]
"""Seconds that jobs ran, by round and facility."""
WINDOW = 5
"""Latest rounds that count."""
NOTE = "limited"
"""Note of the archive: after which round a limit ended the federation, and why."""
MOVED = "moved"
"""Key of it: the limit was moved, and the federation goes on."""
UNDER_WAY = "under_way"
"""Note of the archive: since when the round under way is, and whether it was never interrupted."""


@dataclass(frozen=True, kw_only=True)
class Exceeded:
    """A limit that the next round is expected to exceed."""

    limit: str
    """`deadline` or `node_hours`."""
    reason: str


def exceeded_in(
    archive: Archive, settings: CoordinatorSettings, history: Sequence[RoundFile], now: float
) -> Exceeded | None:
    """`exceeded` by this federation's limits, if it has any, and the archive's journal."""
    if settings.limits is None:
        return None
    entries, nodes = Journal(archive.path).read(), nodes_of(history)
    return exceeded(
        settings.limits,
        history,
        now,
        evaluates=settings.final_evaluation,
        jobs=job_seconds(without_rewound(entries), running=True),
        waited=waited_node_seconds(entries, without_round=True)
        + aside_node_seconds(entries, rounds_set_aside(archive), nodes),
    )


def exceeded(
    limits: LimitSettings,
    history: Sequence[RoundFile],
    now: float,
    *,
    evaluates: bool,
    jobs: Jobs | None = None,
    waited: float = 0.0,
) -> Exceeded | None:
    """Which limit forbids another round after `history`, if any. `now`: seconds since 1970; `evaluates`: a final
    evaluation follows the last round; `jobs`: `job_seconds` of the journal; `waited`: node-seconds of jobs that waited
    for a model and ended without a round, and of rounds that were set aside (`aside_node_seconds`)."""
    if limits.deadline:
        left = limits.seconds_until(now)
        expected = round_seconds(history) + (evaluation_seconds(history) if evaluates else 0.0)
        if left <= 0:
            return Exceeded(limit="deadline", reason=f"the deadline {limits.deadline} has passed")
        if expected > left:
            return Exceeded(
                limit="deadline",
                reason=f"the next round is expected to take {format_duration(expected)}, and {format_duration(left)} "
                f"are left until the deadline {limits.deadline}",
            )
    if limits.node_hours:
        delivered = as_delivered(jobs or {}, history)
        nodes = nodes_of(history)
        used = [node_seconds(entry, delivered, nodes) for entry in history]
        coming = _median(used) + (evaluation_node_seconds(history) if evaluates else 0.0)
        spent, expected = (sum(used) + waited) / 3600, coming / 3600
        if spent + expected > limits.node_hours or spent >= limits.node_hours:
            return Exceeded(
                limit="node_hours",
                reason=f"{spent:.3g} of {limits.node_hours:g} node-hours are spent, and the next round is expected to "
                f"need {expected:.3g}",
            )
    return None


def round_seconds(history: Sequence[RoundFile]) -> float:
    """Expected wall time of the next round, queues included; 0 where no round was timed."""
    return _median([entry.seconds for entry in history if entry.seconds > 0])


def evaluation_node_seconds(history: Sequence[RoundFile]) -> float:
    """Expected node-seconds of the final evaluation: loading and evaluating at every facility, of the last rounds.

    None of it can have taken more than the facility's whole round, as that counts.
    """
    return _median([sum(map(_evaluation_of_row, entry.facilities)) for entry in history])


def _evaluation_of_row(row: FacilityRow) -> float:
    return min(_evaluating(row) * row.nodes, _of_row(row, 0.0, 1))


def _evaluating(row: FacilityRow) -> float:
    """Seconds in which a facility loads and evaluates one model; in a round it evaluates two."""
    return row.phases.get("load", 0.0) + row.phases.get("evaluate", 0.0) / 2


def evaluation_seconds(history: Sequence[RoundFile]) -> float:
    """Expected time of the final evaluation: the slowest facility's loading and evaluating, of the last rounds.

    Nobody's can have taken longer than the round, whatever its report says.
    """
    slowest = [
        min(
            max(map(_evaluating, entry.facilities), default=0.0),
            entry.seconds if entry.seconds > 0 else math.inf,
        )
        for entry in history
    ]
    return _median(slowest)


def node_seconds(entry: RoundFile, jobs: Jobs | None = None, nodes: Mapping[str, int] | None = None) -> float:
    """What the jobs of a round used.

    As they reported. Where the journal saw a facility's jobs run for longer (some failed, ran out of time, or go on):
    as long as it saw, times the nodes that the report names, else those in `nodes` (of `nodes_of`), else one.
    """
    return sum(
        _of_row(row, (jobs or {}).get((entry.round, row.facility), 0.0), (nodes or {}).get(row.facility, 1))
        for row in entry.facilities
    )


def aside_node_seconds(entries: Sequence[Entry], aside: Sequence[RoundFile], nodes: Mapping[str, int]) -> float:
    """What the jobs of rounds used that `crossfed rewind` set aside: as for others (`node_seconds`), all rewinds
    together. `aside`: the files of those rounds; `nodes`: of `nodes_of`."""
    every, stands = (job_seconds(some, running=True) for some in (entries, without_rewound(entries)))
    seen = as_delivered({key: max(0.0, seconds - stands.get(key, 0.0)) for key, seconds in every.items()}, aside)
    reported: dict[tuple[int, str], list[FacilityRow]] = {}
    for entry in aside:
        for row in entry.facilities:
            reported.setdefault((entry.round, row.facility), []).append(row)
    used = 0.0
    for key in seen.keys() | reported.keys():
        each = [_of_row(row, 0.0, 1) for row in reported.get(key, [])]
        counts = [row.nodes for row, one in zip(reported.get(key, []), each, strict=True) if one] or [
            nodes.get(key[1], 1)
        ]
        used += max(sum(each), seen.get(key, 0.0) * max(counts))
    return used


def _of_row(row: FacilityRow, seen: float, nodes: int) -> float:
    reported = float(row.usage.get("node_seconds") or row.seconds)
    return max(reported, seen * (row.nodes if reported else nodes))


def nodes_of(history: Sequence[RoundFile]) -> dict[str, int]:
    """The nodes of each facility's jobs: the median of those that reported."""
    found: dict[str, list[int]] = {}
    for row in (row for entry in history for row in entry.facilities if row.usage.get("node_seconds")):
        found.setdefault(row.facility, []).append(row.nodes)
    return {name: math.ceil(statistics.median(counts)) for name, counts in found.items()}


def job_seconds(entries: Sequence[Entry], *, running: bool = False) -> dict[tuple[int, str], float]:
    """By round and facility, how long its jobs ran, all attempts together, as the journal saw them. `running`: those
    that have not ended as well, until the journal's last line.

    A run that was killed records no end: its jobs ran until the next run at the latest, and for no longer than their
    templates let them.
    """
    begun: dict[str, Entry] = {}
    limits: Mapping[str, float] = {}
    found: dict[tuple[int, str], float] = {}

    def add(start: Entry | None, end: float) -> None:
        if start is not None and start.round is not None:
            key = (start.round, start.facility)
            found[key] = found.get(key, 0.0) + max(0.0, end - start.time)  # less: the clock was set back

    for entry in entries:
        if entry.kind == "started":
            begun[entry.facility] = entry
        elif entry.kind == "run_started":
            for name, start in begun.items():
                add(start, min(entry.time, start.time + limits.get(name, math.inf)))
            begun, limits = {}, entry.detail.get("limits", {})
        elif entry.kind in ("trained", "requeued", "run_ended"):
            ended = [entry.facility] if entry.facility else list(begun)
            for name in ended:
                add(begun.pop(name, None), entry.time)
    for start in begun.values() if running else ():
        add(start, entries[-1].time)
    return found


def as_delivered(jobs: Jobs, history: Sequence[RoundFile]) -> dict[tuple[int, str], float]:
    """Job seconds by the round that averaged what a job left: a late job was seen in earlier rounds too, and would be
    paid for there as well."""
    found = dict(jobs)
    for entry in history:
        for row in entry.facilities:
            for earlier in range(entry.round - row.staleness, entry.round):
                key = (entry.round, row.facility)
                found[key] = found.get(key, 0.0) + found.pop((earlier, row.facility), 0.0)
    return found


def seconds_of(note: dict[str, Any], number: int, now: float) -> float:
    """Seconds since round `number` began; 0 where it was interrupted, which makes its time no measure."""
    if note.get("round") != number or not note.get("whole"):
        return 0.0
    return max(0.0, now - float(note.get("since", now)))


def _median(values: Sequence[float]) -> float:
    return statistics.median(values[-WINDOW:]) if values else 0.0
