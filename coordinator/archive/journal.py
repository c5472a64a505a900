"""`events.jsonl` in the archive: every transition of a federation with its time, one JSON object a line.

Appended by `crossfed run`. Every line holds `time` (UTC), `unix` (seconds since 1970) and `kind`.
Times are of the coordinator's clock. What a facility says (a reason, a log) is quoted text, never an event.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from facility.exchange.files.durable import append_lines
from facility.exchange.json_text import parse_values

FILE = "events.jsonl"
KINDS: Mapping[str, str] = {
    "run_started": "`crossfed run` begins; `rounds`: complete rounds that it goes on from; `limits`: seconds that a "
    "job of each facility may take by its template, where that says",
    "round_started": "the steps of a round begin",
    "queued": "a facility's job is in its queue; `job`",
    "started": "the job has begun (with neither queue nor scheduler: the step has begun)",
    "requeued": "the scheduler has taken the job from its nodes, and it waits in the queue again; `job`",
    "ahead": "a job is in the queue ahead of its model; `job`",
    "waited": "a job that began ahead of its model has waited for it until then; `job`, `seconds`, `nodes`, `handed` "
    "(false: it ended without a round)",
    "stage": "the job says that it is `waiting` (for an earlier job of its round), `loading`, `evaluating`, `training` "
    "or `saving`; `stage`",
    "trained": "the job has ended; `code`, and `problem` where the scheduler has one to report",
    "sent": "a directory has been copied to a facility; `what`, `bytes`, `seconds`",
    "transferred": "a directory has been copied from a facility; `what`, `bytes`, `seconds`",
    "verified": "an update is sound and may be averaged",
    "refused": "a facility's part of a round is lost; `reason`",
    "late": "a round has closed without a facility whose job goes on, for a later round; `reason`",
    "log": "the last `lines` of the log of a job that failed",
    "averaging": "aggregation begins",
    "averaged": "a round is complete; `decision`",
    "compared": "a part of the comparison of models is complete; `text`",
    "repeated": "a round is asked for again; `reason`",
    "rewound": "`crossfed rewind` set this round and later ones aside",
    "login_refused": "a facility refuses the login; `reason`",
    "login_works": "it takes the login again",
    "stuck": "a job will not begin by itself; `reason`, `advice`",
    "problem": "anything else that a person should know; `text`",
    "run_ended": "`crossfed run` ends; `code`, `reason`",
}
"""Every kind of line, and what it means."""
LATE_SECONDS = 10.0
"""A line may be later in the file than others of its time; a clock that was set back by more is seen as that."""
LOOKED_AT = 2
"""Lines in a row that are earlier than one before them, which show such a clock and not a late line."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line."""

    time: float
    kind: str
    """Key of `KINDS`."""
    facility: str = ""
    """Empty: the coordinator."""
    round: int | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


class Journal:
    """Appends to and reads the file. What is appended before the archive exists, or while its disk is full, is kept."""

    def __init__(self, archive: Path) -> None:
        self.path = archive / FILE
        self._kept: list[str] = []

    def append(self, kind: str, *, time: float, facility: str = "", round: int | None = None, **detail: Any) -> Entry:
        """Write one line. A disk that is full stops no federation: what it does not take comes with a later line."""
        entry = Entry(time=time, kind=kind, facility=facility, round=round, detail=detail)
        known = {"facility": facility} if facility else {}
        record = {"time": _iso(time), "unix": _milliseconds(time), "kind": kind, **known}
        record |= ({"round": round} if round is not None else {}) | detail
        self._kept.append(json.dumps(record, ensure_ascii=False) + "\n")
        if self.path.parent.is_dir():
            with suppress(OSError):
                append_lines(self.path, "".join(self._kept))
                self._kept = []
        return entry

    def read(self) -> list[Entry]:
        """All lines in order of time; half a line that a crash left is passed over.

        Where the coordinator's clock was set back, all that follows is later by as much.
        """
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return []
        found = _on_one_clock([entry for line in lines if (entry := _entry(line)) is not None])
        return sorted(_in_order(found), key=lambda entry: entry.time)


def _on_one_clock(found: Sequence[Entry]) -> list[Entry]:
    """The entries with times that go on where the clock was set back. A wait is recorded when it is over."""
    ordered = [place for place, entry in enumerate(found) if entry.kind != "waited"]
    set_back, latest, shifts = 0.0, -math.inf, [0.0] * len(found)
    for number, place in enumerate(ordered):
        now = found[place].time + set_back
        following = max(found[other].time for other in ordered[number : number + LOOKED_AT]) + set_back
        if following < latest - LATE_SECONDS:
            set_back, now = set_back + latest - now, latest
        latest = max(latest, now)
        shifts[place] = set_back
    for place, entry in enumerate(found):
        if entry.kind == "waited" and place:
            shifts[place] = shifts[place - 1]
    return [replace(entry, time=entry.time + by) if by else entry for entry, by in zip(found, shifts, strict=True)]


def _in_order(found: Sequence[Entry]) -> list[Entry]:
    """The entries of one facility in the order of their lines where a small step of the clock set them back: what
    comes later is not earlier. What is behind by more than such a step is a line that is late."""
    latest: dict[str, float] = {}
    ordered = []
    for entry in found:
        before = latest.get(entry.facility, -math.inf)
        if entry.kind != "waited":
            if before - LATE_SECONDS <= entry.time < before:
                entry = replace(entry, time=before)
            latest[entry.facility] = max(before, entry.time)
        ordered.append(entry)
    return ordered


def without_rewound(entries: Iterable[Entry]) -> list[Entry]:
    """Without what was written of rounds before `crossfed rewind` set them aside, and of that itself."""
    found: list[Entry] = []
    for entry in entries:
        if entry.kind == "rewound":
            found = [one for one in found if one.round is None or one.round < (entry.round or 0)]
        else:
            found.append(entry)
    return found


def waited_node_seconds(entries: Iterable[Entry], *, without_round: bool = False) -> float:
    """Node-seconds that jobs waited for their models. `without_round`: of those alone that ended without one, and so
    are in no update's report."""
    waits = [one.detail for one in entries if one.kind == "waited"]
    return sum(
        float(one.get("seconds", 0.0)) * max(1, int(one.get("nodes", 1)))
        for one in waits
        if not (without_round and one.get("handed"))
    )


def waited_by_facility(entries: Iterable[Entry]) -> dict[str, float]:
    """Node-seconds that jobs submitted ahead waited for their models, by facility that has such jobs."""
    waits: dict[str, list[Entry]] = {}
    for one in entries:
        if one.kind == "waited":
            waits.setdefault(one.facility, []).append(one)
    return {name: waited_node_seconds(waits[name]) for name in sorted(waits)}


def _entry(line: str) -> Entry | None:
    try:
        raw = parse_values(line)
        raw.pop("time", None)
        found = Entry(
            time=float(raw.pop("unix")),
            kind=raw.pop("kind"),
            facility=raw.pop("facility", ""),
            round=raw.pop("round", None),
            detail=raw,
        )
        return found if math.isfinite(found.time) else None
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        return None


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _milliseconds(seconds: float) -> float:
    return float(f"{seconds:.3f}")
