"""What was predicted of each facility's jobs beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.report.cost import by_facility


def predictions(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Memory of the largest rank by facility, of the round in which it needed most; facilities that reported nothing
    are left out. `ratio`: measured over predicted; None where nothing was predicted."""
    found, by_name = {}, by_facility(row for row in rows if row.get("peak_memory_bytes"))
    for name in names:
        own = by_name.get(name, [])
        if own:
            most = max(own, key=lambda row: row["peak_memory_bytes"])
            measured, predicted = most["peak_memory_bytes"], most.get("predicted_memory_bytes") or None
            found[name] = {
                "round": most["round"],
                "predicted_memory_bytes": predicted,
                "peak_memory_bytes": measured,
                "ratio": round(measured / predicted, 3) if predicted else None,
            }
    return found
