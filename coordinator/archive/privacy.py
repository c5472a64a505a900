"""Privacy budgets as facilities report them: the latest of each, as data and as one sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coordinator.archive.rounds import RoundFile
from facility.exchange.errors import ManifestError
from facility.exchange.messages.privacy import privacy_of
from facility.exchange.messages.report import Report

NAMED = 5
"""Rounds that are named in a sentence."""


def reported_privacy(report: Report) -> dict[str, Any]:
    """What a report says of its privacy budget; empty where nothing, or nothing that can be read."""
    try:
        found = privacy_of(report.details)
    except ManifestError:
        return {}
    return {} if found is None else dataclasses.asdict(found)


def reported_deviations(history: Iterable[RoundFile], now: Mapping[str, Report]) -> list[dict[str, float]]:
    """By facility, the standard deviation of the noise in its validation loss, in nats: of each round in `history`, and
    of the one whose reports are `now`. Those without differential privacy are left out."""
    rounds = [{row.facility: row.privacy for row in entry.facilities} for entry in history]
    rounds.append({name: reported_privacy(report) for name, report in now.items()})
    return [{name: one["validation_deviation"] for name, one in row.items() if one} for row in rounds]


def latest_privacy(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By facility, what reports most noised steps, and of these most spent on validation: no round or evaluation that
    is set aside gives any of it back."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        one, before = row.get("privacy"), found.get(row["facility"])
        if one and (before is None or _released(one) >= _released(before)):
            found[row["facility"]] = one
    return found


def _released(budget: Mapping[str, Any]) -> tuple[int, float]:
    return budget["steps"], budget["spent_on_validation"]


def without_budget(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """By facility that reported a budget in some round, the rounds that averaged an update of it without one.

    No epsilon holds for its data: differential privacy was switched on or off between the rounds.
    """
    found: dict[str, list[int]] = {name: [] for name in latest_privacy(rows)}
    for row in rows:
        if row["facility"] in found and row["status"] == "ok" and not row.get("privacy"):
            found[row["facility"]].append(row["round"])
    return {name: rounds for name, rounds in found.items() if rounds}


def nothing_promised(rounds: Sequence[int]) -> str:
    """What a person reads of a facility that trained in these rounds without a budget."""
    listed = ", ".join(map(str, rounds[:NAMED])) + (f" and {len(rounds) - NAMED} more" if len(rounds) > NAMED else "")
    return f"nothing is promised for its data, which it trained on without a budget in round {listed}"


def privacy_summary(
    rows: Sequence[Mapping[str, Any]], aside: Sequence[Mapping[str, Any]], final: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Over all facilities: data are disjoint, so the largest epsilon holds for all; empty where none is reported.

    `rows`: of all facilities in the order of rounds; `aside`: of rounds and evaluations that were set aside; `final`:
    of the final evaluation, which releases one more validation loss.
    """
    every = [row for row in [*aside, *rows, *final] if row.get("privacy")]
    reports = latest_privacy(every)
    if not reports:
        return {}
    first: dict[str, dict[str, Any]] = {}
    for row in every:
        before = first.get(row["facility"])
        if before is None or row["privacy"]["steps"] < before["steps"]:
            first[row["facility"]] = row["privacy"]
    return {
        "epsilon": max(one["spent"] for one in reports.values()),
        "epsilon_of_validation": max(one["spent_on_validation"] for one in reports.values()),
        "final_counted": all(row.get("privacy") for row in final if row["status"] == "ok"),
        "delta": max(one["delta"] for one in reports.values()),
        "stated": max(one["epsilon"] for one in reports.values()),
        "stated_first": max(one["epsilon"] for one in first.values()),
        "facilities": dict(reports),
        "without_budget": without_budget(rows),
    }


def budget_sentence(name: str, one: Mapping[str, Any], without: Sequence[int] = ()) -> str:
    """A facility's budget for a person. `without`: rounds in which it trained without one."""
    return (
        f"privacy of {name}: epsilon {one['spent']:.3g} of {one['epsilon']:g} (delta {one['delta']:g}, unit "
        f"{one['unit']}) after {one['steps']:,} noised steps, noise multiplier {one['noise_multiplier']:.3g}; epsilon "
        f"{one['spent_on_validation']:.3g} of its validation data, by losses with noise of "
        f"{one['validation_deviation']:.2g} nats" + (f"; {nothing_promised(without)}" if without else "")
    )
