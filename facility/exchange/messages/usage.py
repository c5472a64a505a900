"""What a job used: nodes, GPUs and energy, in the manifest of its update."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facility.exchange.errors import ManifestError
from facility.exchange.messages.manifest import Manifest, with_extra
from facility.exchange.messages.plausible import MOST_JOULES, MOST_NODES
from facility.exchange.messages.strict_json import Fields

USAGE = "usage"
"""Key in a manifest's `extra`."""
SOURCES = ("sacct", "pm_counters", "nvml", "rapl")
"""Energy counters in the order of preference: the whole job, whole nodes, GPUs, processors."""
MOST_SECONDS = 1e12


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What one job used: node and GPU time, and energy where a counter answers."""

    node_seconds: float
    nodes: int = 0
    """Of the job; 0: not reported, as by earlier versions."""
    gpu_seconds: float = 0.0
    """0: no GPUs."""
    energy_joules: float | None = None
    """What the counter gained between the job's start and its end; None: no counter answered."""
    energy_source: str = ""
    """One of `SOURCES`."""


def with_usage(update: Path, usage: Usage) -> None:
    """Say in an update's manifest what its job used."""
    with_extra(update, USAGE, dataclasses.asdict(usage))


def usage_of(manifest: Manifest) -> dict[str, Any]:
    """What a facility's manifest says, as plain data; {} where it says nothing or nothing possible.

    Keys that this version does not know are passed over: a newer facility's hours and energy count all the same.
    """
    raw = manifest.extra.get(USAGE)
    if not isinstance(raw, dict):
        return {}
    try:
        found = Fields(raw=raw, where=USAGE)
        usage: dict[str, Any] = {
            "node_seconds": found.number("node_seconds", most=MOST_SECONDS),
            "gpu_seconds": found.number("gpu_seconds", 0.0, most=MOST_SECONDS),
        }
        if nodes := found.whole("nodes", 0, most=MOST_NODES):
            usage["nodes"] = nodes
        if raw.get("energy_joules") is None:
            return usage
        source = found.one_of("energy_source", "", SOURCES)
        return usage | {"energy_joules": found.number("energy_joules", most=MOST_JOULES), "energy_source": source}
    except ManifestError:
        return {}
