"""The report's data cut to what a page can show of many facilities: sums, and by name those that need attention.

Each section names the facilities that are worst in what it is about. `report.json` has all of them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from coordinator.archive.many import names_of
from coordinator.archive.table import one_of, to_show

MANY = 32
"""Facilities that are all shown by name."""
SHOWN = 12
"""Of more, how many are, in each table."""
MOST_LANES = 64
"""Of the timeline, and lines of the map of cosines and of the matrix at most half as many."""
MOST_FAILURES = 100
"""With more, those of one reason in one round share a line, and the last ones are shown."""

T = TypeVar("T")
Row = dict[str, Any]
HOME = {"'s update": "own update", " alone": "own alone"}
"""What stands for the models of each row's own facility, by the ends of their names."""


def for_display(data: Mapping[str, Any]) -> dict[str, Any]:
    """The report's data with at most some facilities in each table, and in `chosen` which ones by table; the whole data
    where there are few."""
    if len(data["facilities"]) <= MANY:
        return dict(data) | {
            "chosen": dict.fromkeys(("time", "traffic", "cost", "memory", "drift", "privacy", "rounds"), "")
        }
    totals, costs, privacy = data["timeline"]["totals"], data["cost"]["facilities"], data["privacy"]
    of = f"of {len(data['facilities'])}; report.json has all"
    small = dict(data) | {
        "timeline": data["timeline"] | {"totals": most(totals, unused)},
        "traffic": most(data["traffic"], slowest),
        "cost": data["cost"] | {"facilities": most(costs, lambda one: one["node_hours"] or 0.0)},
        "predictions": most(data["predictions"], lambda one: abs((one["ratio"] or 1.0) - 1.0)),
        "drift": most(data["drift"], lambda one: one["rounds"] - one["corrected"]),
        "rounds": [entry | {"facilities": summed(entry["facilities"])} for entry in data["rounds"]],
        "failures": grouped(data["failures"]),
        "versions": alike(data["versions"]),
        "settings": with_equal_facilities(data["settings"]),
        "matrix": of_own_models(data["matrix"]),
    }
    if privacy:
        small["privacy"] = privacy | {"facilities": most(privacy["facilities"], lambda one: one["spent"] or 0.0)}
    small["chosen"] = {
        "time": f": the {SHOWN} with most time idle or lost {of}",
        "traffic": f": the {SHOWN} with the slowest transfers {of}",
        "cost": f": the {SHOWN} with most node-hours {of}",
        "memory": f": the {SHOWN} furthest from their prediction {of}",
        "drift": f": the {SHOWN} with most rounds without it {of}",
        "privacy": f"The {SHOWN} that have spent most {of}.",
        "rounds": f": those that need attention {of}",
    }
    return small


def most(found: Mapping[str, T], key: Callable[[T], float]) -> dict[str, T]:
    """The `SHOWN` entries with the largest `key`, largest first; equal ones in their order."""
    return dict(sorted(found.items(), key=lambda item: -key(item[1]))[:SHOWN])


def unused(sums: Mapping[str, float]) -> float:
    """Seconds that a facility was idle or lost."""
    return sums["idle"] + sums.get("lost", 0.0)


def slowest(one: Mapping[str, Any]) -> float:
    """Largest for the slowest of both directions; least where nothing was timed."""
    speeds = [speed for speed in (one["to_mbit_per_second"], one["from_mbit_per_second"]) if speed]
    return -min(speeds) if speeds else float("-inf")


def summed(rows: Sequence[Row]) -> list[Row]:
    """Rows of one round: one for all that are well, with sums of tokens and weights and medians, then the others."""
    alone, together = to_show(rows)
    if not together:
        return list(alone)
    one = one_of(together)
    return [one | {"facility": f"{len(together)} facilities", "status": "ok (medians)"}, *alone]


def grouped(failures: Sequence[Row]) -> list[Row]:
    """All of few; of many one line for each reason, state and round, and the last ones of these."""
    if len(failures) <= MOST_FAILURES:
        return list(failures)
    lines: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for one in failures:
        lines[one["round"], one["status"], one["reason"], one["done"]].append(one["facility"])
    return [
        {"round": number, "facility": names_of(names, SHOWN), "status": status, "reason": reason, "done": done}
        for (number, status, reason, done), names in [*lines.items()][-MOST_FAILURES:]
    ]


def alike(versions: Mapping[str, Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    """Facilities with the same versions on one line."""
    lines: dict[str, list[str]] = defaultdict(list)
    for name, of in versions.items():
        lines[json.dumps(of)].append(name)
    return {names_of(names, SHOWN): versions[names[0]] for names in lines.values()}


def with_equal_facilities(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose facilities are listed once for all that differ by names and paths alone."""
    lines: dict[str, list[Row]] = defaultdict(list)
    for one in settings.get("facilities", []):
        if not isinstance(one, dict):
            return dict(settings)
        lines[json.dumps({key: value for key, value in one.items() if key not in ("name", "dataset")})].append(one)
    equal = [group[0] | {"name": names_of([one["name"] for one in group], SHOWN)} for group in lines.values()]
    return dict(settings) | ({"facilities": equal} if equal else {})


def of_own_models(matrix: Mapping[str, Any]) -> dict[str, Any]:
    """The matrix with a column for each facility's own models, and the rows whose global model is worst beside them."""
    if len(matrix.get("data", [])) <= MANY:
        return dict(matrix)
    cells = []
    for one in matrix["cells"]:
        own = {f"{one.get('facility') or one['data']}{end}": column for end, column in HOME.items()}
        if one["model"] in own or not one["model"].endswith(tuple(HOME)):
            cells.append(dict(one) | {"model": own.get(one["model"], one["model"])})
    by_row: dict[str, dict[str, float]] = defaultdict(dict)
    for one in cells:
        by_row[one["data"]][one["model"]] = one["perplexity"]

    def regret(row: str) -> float:
        """How much worse the last global model is than the best model there."""
        last = by_row[row].get("global") or by_row[row].get("final")
        return last / min(by_row[row].values()) if last else float("inf")

    rows = sorted(by_row, key=regret, reverse=True)[: MOST_LANES // 2]
    of = f"The {len(rows)} of {len(by_row)} rows where the global model is worst beside others; report.json has all."
    kept = [one for one in cells if one["data"] in rows]
    models = list(dict.fromkeys([*matrix["models"], *HOME.values()]))
    small = dict(matrix) | {
        "data": rows,
        "models": [name for name in models if any(one["model"] == name for one in kept)],
        "cells": kept,
        "caption": f"{matrix['caption']} {of}",
    }
    if "verdicts" in matrix:
        begins = tuple(f"{row}{mark}" for row in rows for mark in (":", ","))
        small["verdicts"] = [line for line in matrix["verdicts"] if line.startswith(begins)]
    return small


def least_alike(participants: Sequence[Row]) -> list[Row]:
    """All of few updates; of many those that point least towards the mean."""
    if len(participants) <= MANY:
        return list(participants)
    return sorted(participants, key=lambda one: one["cosine_to_mean"] or 0.0)[: MOST_LANES // 2]


def lanes_of(names: Sequence[str], totals: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Lanes of the timeline in their order: all of few, of many those with most time idle or lost, and none where
    no time is known (`totals` is empty)."""
    if len(names) <= MOST_LANES:
        return list(names)
    chosen = set(sorted(totals, key=lambda name: -unused(totals[name]))[:MOST_LANES])
    return [name for name in names if name in chosen]
