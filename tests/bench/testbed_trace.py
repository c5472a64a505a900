"""The simulators of rounds beside federations that ran over a testbed: seconds, from what the journals recorded.

    python -m tests.bench.testbed_trace ARCHIVE [ARCHIVE ...] > trace.json

Of each archive: what every job took from its submission to its update, and every round from its last update to the
next model. `simulated`: `coordinator.simulation` with the medians of these for each facility, as a user would describe
the federation. `closing`: the coordinator's own closing of rounds on a simulated clock
(`tests/streamflow_plugin/course.py`), each job as long as it was. Beside both the seconds from the first model on its
way to the last model made. Archives of runs that were stopped say nothing and are refused.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from coordinator.archive.journal import Entry, Journal
from coordinator.archive.rounds import DISCARDED, Archive, RoundFile
from coordinator.config.closing import ClosingSettings
from coordinator.simulation.described import Queue, Scenario, Site
from coordinator.simulation.facilities import simulate_federation
from tests.streamflow_plugin.course import course_of


@dataclass(kw_only=True)
class Trace:
    """One run, in seconds since its first model was sent."""

    jobs: dict[str, list[tuple[float, float, float]]] = field(default_factory=lambda: defaultdict(list))
    """By facility: when each job was submitted, began, and delivered or ended for nothing."""
    made: list[float] = field(default_factory=list)
    """When each round's model was there."""
    averaging: list[float] = field(default_factory=list)
    """Seconds from a round's closing to its model."""
    rounds: list[RoundFile] = field(default_factory=list)

    @property
    def quorum(self) -> int | None:
        """None: every round waited for all."""
        late = any(row.status == "late" for entry in self.rounds for row in entry.facilities)
        return next((entry.wait.quorum for entry in self.rounds if entry.wait), None) if late else None

    @property
    def drops(self) -> bool:
        """Late updates were discarded."""
        return any(row.reason == DISCARDED for entry in self.rounds for row in entry.facilities)


def read(archive: Archive) -> Trace:
    entries = Journal(archive.path).read()
    if (runs := sum(entry.kind == "run_started" for entry in entries)) != 1:
        raise SystemExit(f"{archive.path} is of {runs or 'no'} runs, expected the archive of one that was not stopped")
    trace = Trace(rounds=archive.history())
    began = next((entry.time for entry in entries if entry.kind == "sent"), math.nan)
    if math.isnan(began):
        raise SystemExit(f"{archive.path} tells of no model on its way to a facility, expected one over a testbed")
    open_jobs: dict[str, list[float]] = {}
    ended: dict[str, float] = {}
    closing = 0.0
    for entry in entries:
        if (entry.round or 0) >= len(trace.rounds):  # the final evaluation
            continue
        now = entry.time - began
        if entry.kind == "queued":
            _discard(trace, entry.facility, open_jobs, ended)
            open_jobs[entry.facility] = [now]
        elif entry.kind == "started" and entry.facility in open_jobs:
            open_jobs[entry.facility].append(now)
        elif entry.kind == "trained":
            ended[entry.facility] = now
        elif _update_came(entry) and entry.facility in open_jobs:
            times = open_jobs.pop(entry.facility)
            ended.pop(entry.facility, None)
            trace.jobs[entry.facility].append((times[0], times[-1], now))
        elif entry.kind == "averaging":
            closing = now
        elif entry.kind == "averaged":
            trace.averaging.append(now - closing)
            trace.made.append(now)
    if len(trace.made) != len(trace.rounds) or not trace.jobs:
        raise SystemExit(f"{archive.path} has {len(trace.rounds)} rounds and {len(trace.made)} in its journal")
    return trace


def _discard(trace: Trace, name: str, open_jobs: dict[str, list[float]], ended: dict[str, float]) -> None:
    """Another job is submitted: the one before, if it has ended, was for nothing."""
    times, end = open_jobs.pop(name, None), ended.pop(name, None)
    if times is not None and end is not None and trace.drops:
        trace.jobs[name].append((times[0], times[-1], end))


def _update_came(entry: Entry) -> bool:
    return entry.kind == "transferred" and entry.detail.get("what") == "update"


def simulated(trace: Trace) -> float:
    """Seconds by the simulator of federations, from medians."""
    sites = [
        Site(
            name=name,
            train_seconds=median(end - start for _, start, end in jobs),
            queue=Queue(kind="fixed", seconds=median(start - queued for queued, start, _ in jobs)),
        )
        for name, jobs in sorted(trace.jobs.items())
    ]
    policy: dict[str, Any] = {"policy": "synchronous"}
    if trace.quorum is not None:
        policy = {"policy": "quorum", "quorum": trace.quorum, "late": "drop" if trace.drops else "carry"}
    federation = Scenario(
        rounds=len(trace.rounds), facilities=sites, aggregate_seconds=median(trace.averaging), **policy
    )
    return float(simulate_federation(federation).seconds)


def closing(trace: Trace) -> float:
    """Seconds by the closing of rounds, with every job as long as it was; averaging is added."""
    lasted = {name: iter([end - queued for queued, _, end in jobs]) for name, jobs in trace.jobs.items()}
    usual = {name: median(end - queued for queued, _, end in jobs) for name, jobs in trace.jobs.items()}
    settings = None
    if trace.quorum is not None:
        settings = ClosingSettings(quorum=trace.quorum, grace=0.0, late="drop" if trace.drops else "carry")
    averaging = median(trace.averaging)

    def seconds(name: str, _: int) -> float:
        return next(lasted[name], usual[name])

    course = course_of(settings, sorted(trace.jobs), seconds, len(trace.rounds), between=averaging)
    return course.closed[-1] + averaging


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", type=Path, nargs="+", metavar="ARCHIVE")
    logging.disable(logging.WARNING)
    rows = {}
    for path in parser.parse_args().archives:
        trace = read(Archive(path))
        measured, by_medians, by_closing = trace.made[-1], simulated(trace), closing(trace)
        rows[str(path)] = {
            "rounds": len(trace.rounds),
            "quorum": trace.quorum or "all",
            "measured": round(measured, 1),
            "simulated": round(by_medians, 1),
            "simulated_error": round(by_medians / measured - 1, 3),
            "closing": round(by_closing, 1),
            "closing_error": round(by_closing / measured - 1, 3),
        }
    json.dump(rows, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
