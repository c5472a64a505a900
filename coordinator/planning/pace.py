"""How fast a facility was in its latest rounds, from what the archive and the journal recorded of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from coordinator.archive.journal import Entry, without_rewound
from coordinator.archive.rounds import FacilityRow, RoundFile
from coordinator.planning.budget import FacilityPace

ROUNDS = 5
"""Latest sound rounds of a facility whose median counts."""


MOST_TRAINING = 1e9
"""Seconds of training in a round beyond which a report says nothing of a pace."""


def sound_rows(rows: Iterable[FacilityRow], name: str) -> list[FacilityRow]:
    """The latest rows of a facility that are fit for estimating its pace: what it says of itself may be odd."""
    own = [row for row in rows if row.facility == name and row.status == "ok"]
    return [row for row in own if min(row.steps, row.samples, row.tokens) > 0 and 0 < trained(row) <= MOST_TRAINING][
        -ROUNDS:
    ]


def trained(row: FacilityRow) -> float:
    """Seconds that a facility says it trained; 0 where it says nothing."""
    return row.tokens / row.tokens_per_second if row.tokens_per_second > 0 else 0.0


def of_job(row: FacilityRow) -> float:
    """Seconds of a facility's job, from its first command on: what the trainer counts begins when it has started."""
    return max(row.seconds, float(row.usage.get("node_seconds") or 0.0) / row.nodes)


def pace_of(
    name: str,
    rows: Sequence[FacilityRow],
    *,
    queue_seconds: float = 0.0,
    moving_seconds: float = 0.0,
) -> FacilityPace:
    """From its `sound_rows`, one at least. `moving_seconds`: of the model and the update."""
    train = [trained(row) for row in rows]
    fixed = statistics.median(max(0.0, of_job(row) - t) for t, row in zip(train, rows, strict=True))
    return FacilityPace(
        name=name,
        seconds_per_step=statistics.median(t / row.steps for t, row in zip(train, rows, strict=True)),
        samples_per_step=statistics.median(row.samples / row.steps for row in rows),
        queue_seconds=queue_seconds,
        fixed_seconds=fixed + moving_seconds,
    )


def queue_waits(entries: Sequence[Entry]) -> dict[str, float]:
    """By facility, the median wait of its latest jobs in their queue, in seconds."""
    since: dict[str, float] = {}
    waits: dict[str, list[float]] = {}
    for entry in entries:
        if entry.kind == "queued":
            since[entry.facility] = entry.time
        elif entry.kind == "started" and entry.facility in since:
            waits.setdefault(entry.facility, []).append(entry.time - since.pop(entry.facility))
    return _medians(waits)


def times_beside_training(entries: Sequence[Entry], rows: Iterable[FacilityRow]) -> dict[str, list[float]]:
    """By facility, the seconds of each of its jobs from submission to end in which it did not train, oldest first.

    Its queue, its template's own commands, the start of its program, loading, evaluating and saving.
    """
    training = {
        (row.facility, row.round - row.staleness): trained(row)
        for row in rows
        if row.status == "ok" and row.tokens_per_second > 0
    }
    since: dict[str, tuple[int, float]] = {}
    found: dict[str, list[float]] = {}
    for entry in without_rewound(
        entries
    ):  # a job of a round that was set aside trained for other times than its row says
        if entry.kind == "queued" and entry.round is not None:
            since[entry.facility] = entry.round, entry.time
        elif entry.kind == "transferred" and entry.facility in since:
            number, began = since.pop(entry.facility)
            if (seconds := training.get((entry.facility, number))) is not None:
                beside = entry.time - float(entry.detail.get("seconds", 0.0)) - began - seconds
                found.setdefault(entry.facility, []).append(max(0.0, beside))
    return found


def rounds_beside_training(history: Iterable[RoundFile], name: str) -> list[float]:
    """The seconds of each round in which a facility, which was in time, did not train, oldest first.

    At least what its job took beside training: what is known where no journal says when that was submitted and ended
    (without a queue, or without `crossfed run`).
    """
    return [
        max(0.0, entry.seconds - trained(row))
        for entry in history
        for row in entry.facilities
        if entry.seconds > 0 and row.facility == name and row.status == "ok" and not row.staleness
        if row.tokens_per_second > 0
    ]


def moving_times(entries: Sequence[Entry]) -> dict[str, float]:
    """By facility, the median seconds that the model takes there and the update back."""
    there, back = times_there_and_back(entries)
    return {name: there.get(name, 0.0) + back.get(name, 0.0) for name in {*there, *back}}


def times_there_and_back(entries: Sequence[Entry]) -> tuple[dict[str, float], dict[str, float]]:
    """By facility, the median seconds of the model's way there, and of the update's back."""
    times: dict[str, dict[str, list[float]]] = {"sent": {}, "transferred": {}}
    for entry in entries:
        if entry.kind in times:
            times[entry.kind].setdefault(entry.facility, []).append(float(entry.detail.get("seconds", 0.0)))
    return _medians(times["sent"]), _medians(times["transferred"])


def _medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(found[-ROUNDS:]) for name, found in values.items()}
