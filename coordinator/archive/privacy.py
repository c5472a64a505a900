"""Privacy budgets as facilities report them: the latest of each, as data and as one sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from facility.exchange.errors import ManifestError
from facility.exchange.messages.privacy import privacy_of
from facility.exchange.messages.report import Report


def told_privacy(report: Report) -> dict[str, Any]:
    """What a report says of its privacy budget; empty where nothing, or nothing that can be read."""
    try:
        found = privacy_of(report.details)
    except ManifestError:
        return {}
    return {} if found is None else dataclasses.asdict(found)


def latest_privacy(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By facility, of rows in the order of rounds."""
    return {row["facility"]: row["privacy"] for row in rows if row.get("privacy")}


def summary_of(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Over all facilities: data are disjoint, so the largest epsilon holds for all; empty where none is reported."""
    if not reports:
        return {}
    return {
        "epsilon": max(one["spent"] for one in reports.values()),
        "delta": max(one["delta"] for one in reports.values()),
        "stated": max(one["epsilon"] for one in reports.values()),
        "facilities": dict(reports),
    }


def sentence(name: str, one: Mapping[str, Any]) -> str:
    """A facility's budget for a person."""
    return (
        f"privacy of {name}: epsilon {one['spent']:.3g} of {one['epsilon']:g} (delta {one['delta']:g}, unit "
        f"{one['unit']}) after {one['steps']:,} noised steps, noise multiplier {one['noise_multiplier']:.3g}; its "
        f"losses have noise of {one['validation_deviation']:.2g} nats"
    )
