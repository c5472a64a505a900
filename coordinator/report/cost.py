"""Node-hours, GPU-hours, energy and carbon, by facility and in all, from what the jobs reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from coordinator.archive.journal import Entry, waited_node_seconds

JOULES_PER_KWH = 3.6e6

T = TypeVar("T", bound=Mapping[str, Any])


def by_facility(rows: Iterable[T]) -> dict[str, list[T]]:
    """Rows of each facility in their order: a search by name for each of many facilities takes minutes."""
    found: dict[str, list[T]] = {}
    for row in rows:
        found.setdefault(row["facility"], []).append(row)
    return found


def costs(rows: Sequence[dict[str, Any]], names: Sequence[str], carbon: float) -> dict[str, Any]:
    """`facilities` and `total`; None: no facility reported the figure. `carbon`: g CO2e per kWh, 0: unknown."""
    own = by_facility(rows)
    by_name = {name: _sum(own.get(name, []), carbon) for name in names}
    each = list(by_name.values())
    total: dict[str, Any] = {key: _added([one[key] for one in each]) for key in ("node_hours", "gpu_hours", "kwh")}
    total["co2e_kg"] = _added([one["co2e_kg"] for one in each])
    total["energy_over"] = [name for name, one in by_name.items() if one["kwh"] is not None]
    return {"facilities": by_name, "total": total, "carbon_g_per_kwh": carbon}


def with_waiting(cost: dict[str, Any], entries: Sequence[Entry]) -> dict[str, Any]:
    """`cost` with `waited_node_hours`, a part of `node_hours`: of jobs that waited for their model (None: none did)."""
    facilities = {name: dict(one) for name, one in cost["facilities"].items()}
    waits: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.kind == "waited":
            waits.setdefault(entry.facility, []).append(entry)
    for name, one in facilities.items():
        own = waits.get(name, [])
        one["waited_node_hours"] = waited_node_seconds(own) / 3600 if own else None
        if unseen := waited_node_seconds(own, without_round=True) / 3600:
            one["node_hours"] = (one["node_hours"] or 0.0) + unseen
    total = dict(cost["total"])
    for key in ("node_hours", "waited_node_hours"):
        total[key] = _added([one[key] for one in facilities.values()])
    return cost | {"facilities": facilities, "total": total}


def _sum(rows: Sequence[dict[str, Any]], carbon: float) -> dict[str, Any]:
    used = [row["usage"] for row in rows if row.get("usage")]
    joules = _added([one.get("energy_joules") for one in used])
    kwh = None if joules is None else joules / JOULES_PER_KWH
    sources = sorted({one["energy_source"] for one in used if one.get("energy_source")})
    node_seconds = _added([one.get("node_seconds") for one in used])
    gpu_seconds = _added([one.get("gpu_seconds") for one in used])
    return {
        "node_hours": None if node_seconds is None else node_seconds / 3600,
        "gpu_hours": None if gpu_seconds is None else gpu_seconds / 3600,
        "kwh": kwh,
        "energy_source": ", ".join(sources),
        "energy_rounds": sum(one.get("energy_joules") is not None for one in used),
        "rounds": len(used),
        "co2e_kg": None if kwh is None or not carbon else kwh * carbon / 1000,
    }


def _added(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
