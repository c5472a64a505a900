"""What happened between replicas: a line per group, a summary for the report, a Chrome trace."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from facility.exchange.files.durable import write_text
from facility.exchange.scheduling.group import Group

log = logging.getLogger("facility.sync")
TRACE_EVENTS = 200_000
"""Events that the trace keeps at most; the summary counts them all."""


@dataclass(kw_only=True)
class Entry:
    """One group from its decision to its end."""

    group: Group
    at: float
    """Seconds since the scheduler's start at which it was decided."""
    expected: int
    """Ranks that have yet to report its end."""
    standing: bool = False
    """A group of policies in lockstep: it exchanges many times."""
    told: int = 0
    exchanges: int = 0
    failed: int = 0
    seconds: float = 0.0
    """Slowest rank's time in the exchange (summed over the exchanges of a standing group)."""
    slowest: float = 0.0
    bytes: int = 0
    """Bytes that its ranks put on the wire."""


@dataclass(kw_only=True)
class Journal:
    """Written by the scheduler's service; plain data, time is an argument."""

    directory: Path | None = None
    entries: dict[int, Entry] = field(default_factory=dict)
    """Groups whose end has not been reported by all."""
    groups: int = 0
    """Groups that ended well, of two members or more."""
    alone: int = 0
    aborted: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0
    exchange_seconds: float = 0.0
    staleness_sum: int = 0
    staleness_maximum: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    updates: Counter[int] = field(default_factory=Counter)
    reached: Counter[int] = field(default_factory=Counter)
    """Steps of each replica as its heartbeats report, those without an announcement included."""
    included: Counter[int] = field(default_factory=Counter)
    """Steps of each replica up to its last exchange that took place."""
    samples: Counter[int] = field(default_factory=Counter)
    waits: Counter[int] = field(default_factory=Counter)
    events: list[dict[str, Any]] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def decided(self, group: Group, at: float, expected: int, *, standing: bool = False) -> None:
        self.entries[group.number] = Entry(group=group, at=at, expected=expected, standing=standing)

    def told(self, number: int, *, good: bool, seconds: float, sent: int, at: float) -> None:
        """A rank reports the end of its part of a group."""
        entry = self.entries.get(number)
        if entry is None:
            return
        entry.told += 1
        entry.failed += not good
        entry.slowest = max(entry.slowest, seconds)
        entry.bytes += sent
        if entry.told >= entry.expected:
            entry.told, entry.exchanges = 0, entry.exchanges + 1
            entry.seconds, entry.slowest = entry.seconds + entry.slowest, 0.0
            if not entry.standing:
                self._close(entry, at)

    def ended(self, number: int, at: float) -> None:
        """A standing group gives way to another."""
        if number in self.entries:
            self._close(self.entries[number], at)

    def called_off(self, number: int, at: float) -> None:
        """A group was aborted because a member is gone."""
        entry = self.entries.get(number)
        if entry is not None:
            entry.failed += 1
            self._close(entry, at)

    def exchanged(self, group: Group, *, standing: bool) -> None:
        """An exchange took place on every rank; in lockstep it is that of the step under way."""
        for member in group.members:
            assert isinstance(member, int)
            self.included[member] = self.updates[member] + standing

    def event(self, kind: str, replica: int, at: float, reason: str) -> None:
        """Membership: a replica left or came back; recorded with its steps and how many of them are in the average."""
        log.warning("replica %d %s: %s", replica, kind, reason)
        entry = {
            "replica": replica,
            "seconds": round(at, 3),
            "steps": max(self.reached[replica], self.updates[replica], self.included[replica]),
            "steps_included": self.included[replica],
            "reason": reason,
        }
        self.events.append({"event": kind} | entry)
        self.lines.append(json.dumps({"kind": kind} | entry))
        self._mark({"name": kind, "ph": "i", "s": "g", "pid": 0, "tid": replica, "ts": round(at * 1e6)})

    def _close(self, entry: Entry, at: float) -> None:
        """A group ended: count it, draw it for the trace, and write its line."""
        del self.entries[entry.group.number]
        self._count(entry)
        self._draw(entry, at)
        line = _line_of(entry)
        self.lines.append(json.dumps(line))
        log.debug("group %s", line)

    def _count(self, entry: Entry) -> None:
        group, good = entry.group, not entry.failed
        self.aborted += not good
        self.alone += good and len(group) == 1
        self.groups += good and len(group) > 1
        self.bytes += entry.bytes
        self.wait_seconds += sum(group.waits)
        self.exchange_seconds += entry.seconds
        self.staleness_sum += sum(group.staleness)
        self.staleness_maximum = max(self.staleness_maximum, *group.staleness)
        self.sizes[len(group)] += 1
        for member, wait in zip(group.members, group.waits, strict=True):
            assert isinstance(member, int)
            self.waits[member] += wait  # type: ignore[assignment]

    def _draw(self, entry: Entry, at: float) -> None:
        """Each member's wait and exchange, as two bars of its line."""
        group = entry.group
        name = "aborted" if entry.failed else f"group of {len(group)}"
        for member, wait in zip(group.members, group.waits, strict=True):
            about = {"group": group.number}
            exchanged = about | {"members": list(group.members)}
            for what, begin, seconds, told in (
                ("wait", entry.at - wait, wait, about),
                (name, entry.at, at - entry.at, exchanged),
            ):
                bar = {"ph": "X", "pid": 0, "tid": member, "ts": round(begin * 1e6), "dur": round(seconds * 1e6)}
                self._mark({"name": what} | bar | {"args": told})

    def _mark(self, event: dict[str, Any]) -> None:
        if len(self.trace) < TRACE_EVENTS:
            self.trace.append(event)

    def summary(self) -> dict[str, Any]:
        """Plain figures for `report.json`. Seconds are sums over replicas and groups unless named otherwise."""
        members = sum(size * count for size, count in self.sizes.items())
        decided = sum(self.sizes.values())
        return {
            "groups": self.groups,
            "alone": self.alone,
            "aborted": self.aborted,
            "mean_group": round(members / decided, 3) if decided else 0.0,
            "group_sizes": {str(size): count for size, count in sorted(self.sizes.items())},
            "mean_staleness": round(self.staleness_sum / members, 3) if members else 0.0,
            "maximum_staleness": self.staleness_maximum,
            "bytes": self.bytes,
            "wait_seconds": round(self.wait_seconds, 4),
            "exchange_seconds": round(self.exchange_seconds, 4),
            "updates": {str(r): n for r, n in sorted(self.updates.items())},
            "samples": {str(r): n for r, n in sorted(self.samples.items())},
            "waits": {str(r): round(s, 4) for r, s in sorted(self.waits.items())},
            "membership": self.events,
        }

    def write(self) -> None:
        """`groups.jsonl` and `trace.json` (open it in chrome://tracing or Perfetto), where a directory is given."""
        if self.directory is None:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        write_text(self.directory / "groups.jsonl", "".join(line + "\n" for line in self.lines))
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": r, "args": {"name": f"replica {r}"}}
            for r in sorted(self.updates)
        ]
        write_text(
            self.directory / "trace.json", json.dumps({"traceEvents": names + self.trace, "displayTimeUnit": "ms"})
        )


def _line_of(entry: Entry) -> dict[str, Any]:
    """A group that ended, as a line of the journal."""
    group = entry.group
    return {
        "kind": "final" if group.final else "group",
        "group": group.number,
        "members": list(group.members),
        "weights": [round(w, 6) for w in group.weights],
        "influence": round(group.step_scale, 6),
        "staleness": list(group.staleness),
        "waits": [round(w, 6) for w in group.waits],
        "partner": group.partner,
        "after": group.after,
        "bytes": entry.bytes,
        "seconds": round(entry.seconds, 6),
        "exchanges": entry.exchanges,
        "at": round(entry.at, 6),
        "connected": group.connected,
        "reason": group.reason,
        "ended": "aborted" if entry.failed else "well",
    }
