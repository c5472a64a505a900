"""Times of a graph whose messages share links: events in a heap, link capacity divided max-min fairly among flows.

A flow gets at most the bandwidth of its own pair of devices; where a named uplink is short, its flows share it fairly
(progressive filling: Bertsekas and Gallager, Data Networks, 2nd ed. 1992, section 6.5.2). Rates change whenever a flow
begins or ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Task:
    """A node: a computation of `seconds`, or, with `bytes`, a flow."""

    waits: Sequence[int]
    """2n: the end of task n; 2n + 1: its end plus its latency."""
    seconds: float = 0.0
    """Computation time; 0 for a flow."""
    bytes: float = 0.0
    bytes_per_second: float = 0.0
    """Bandwidth of the flow's own pair of devices; 0: not a flow."""
    latency: float = 0.0
    """Seconds from the last byte leaving to its arrival."""
    uplinks: tuple[int, ...] = ()
    """Shared links that the flow crosses."""


@dataclass(slots=True)
class _Flows:
    """Flows that cross shared links, and how fast they are just now."""

    capacities: Sequence[float]
    """Bytes per second of every shared link."""
    remaining: dict[int, float] = field(default_factory=dict)
    rate: dict[int, float] = field(default_factory=dict)
    since: float = 0.0

    def advance(self, now: float) -> None:
        for task, rate in self.rate.items():
            self.remaining[task] -= rate * (now - self.since)
        self.since = now

    def share(self, tasks: Sequence[Task]) -> None:
        """Progressive filling: raise all rates together; a flow at a full link or its own limit keeps its rate."""
        free = list(self.capacities)
        open_flows = set(self.remaining)
        self.rate = dict.fromkeys(open_flows, 0.0)
        while open_flows:
            users = [0] * len(free)
            for flow in open_flows:
                for link in tasks[flow].uplinks:
                    users[link] += 1
            step = min(tasks[flow].bytes_per_second - self.rate[flow] for flow in open_flows)
            for link, count in enumerate(users):
                if count:
                    step = min(step, free[link] / count)
            for flow in open_flows:
                self.rate[flow] += step
            for link, count in enumerate(users):
                free[link] -= step * count
            full = {link for link, count in enumerate(users) if count and free[link] <= 1e-9 * self.capacities[link]}
            stopped = {
                flow
                for flow in open_flows
                if tasks[flow].bytes_per_second - self.rate[flow] <= 1e-9 * tasks[flow].bytes_per_second
                or not full.isdisjoint(tasks[flow].uplinks)
            }
            assert stopped, "fair sharing makes progress"
            open_flows -= stopped

    def ended(self, tasks: Sequence[Task]) -> list[int]:
        """Flows with nothing left but rounding: of their bytes, or of the clock, which such a rest would not move."""
        return [
            flow
            for flow, left in self.remaining.items()
            if left <= 1e-9 * max(1.0, tasks[flow].bytes) or self.since + left / self.rate[flow] <= self.since
        ]

    def next_end(self) -> float:
        return self.since + min(max(0.0, self.remaining[f]) / self.rate[f] for f in self.remaining)


def _followers(tasks: Sequence[Task]) -> list[list[tuple[int, int]]]:
    """For each task those that wait for it: for its end (0), or for its arrival (1)."""
    followers: list[list[tuple[int, int]]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for wait in task.waits:
            followers[wait // 2].append((number, wait % 2))
    return followers


READY, ENDED = 0, 1
"""What happens to a task at a time: one of what it waits for is there, or it is done."""


def run(tasks: Sequence[Task], capacities: Sequence[float] = ()) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Start and end of every task, seconds. `capacities`: bytes per second of the shared links."""
    followers = _followers(tasks)
    missing = [len(task.waits) for task in tasks]
    start = np.full(len(tasks), np.nan)
    end = np.full(len(tasks), np.nan)
    flows = _Flows(capacities)
    heap: list[tuple[float, int, int, int]] = []  # time, sequence, task, READY or ENDED
    sequence = 0
    dirty = False  # the flows under way changed, and their rates are not shared out anew yet

    def push(at: float, task: int, what: int) -> None:
        nonlocal sequence
        heapq.heappush(heap, (at, sequence, task, what))
        sequence += 1

    def finish(task: int, now: float) -> None:
        end[task] = now
        for follower, arrival in followers[task]:
            push(now + (tasks[task].latency if arrival else 0.0), follower, READY)

    for number, task in enumerate(tasks):
        if not task.waits:
            missing[number] = 1
            push(0.0, number, READY)
    while heap or flows.remaining:
        if dirty and (not heap or heap[0][0] > flows.since):
            flows.share(tasks)
            dirty = False
        due = flows.next_end() if flows.remaining and not dirty else np.inf
        if due < np.inf and (not heap or due <= heap[0][0]):
            flows.advance(due)
            for flow in flows.ended(tasks):
                del flows.remaining[flow]
                del flows.rate[flow]
                finish(flow, due)
            dirty = True
            continue
        now, _, number, what = heapq.heappop(heap)
        if what == ENDED:
            finish(number, now)
            continue
        missing[number] -= 1
        if missing[number]:
            continue
        start[number] = now
        task = tasks[number]
        if task.bytes_per_second > 0 and task.bytes > 0 and task.uplinks:
            flows.advance(now)
            flows.remaining[number] = task.bytes
            dirty = True
        else:
            seconds = task.bytes / task.bytes_per_second if task.bytes_per_second > 0 else task.seconds
            push(now + seconds, number, ENDED)
    assert not np.isnan(end).any(), "every task ends"
    return start, end
