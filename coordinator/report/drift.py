"""How much of each facility's steps the correction of drift was, from what the facilities reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.report.cost import by_facility


def drift(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By reporting facility: rounds, corrected rounds, the correction's share of the steps, and why the last had none.

    The part is the norm of the correction over that of what the facility walked by itself, in the first and in the
    latest round that was corrected.
    """
    found, by_name = {}, by_facility(row for row in rows if row.get("drift"))
    for name in names:
        own = by_name.get(name, [])
        corrected = [row for row in own if row["drift"].get("corrected")]
        without = [row for row in own if not row["drift"].get("corrected")]
        if own:
            found[name] = {
                "rounds": len(own),
                "corrected": len(corrected),
                "first_share": _share(corrected[:1]),
                "latest_share": _share(corrected[-1:]),
                "uncorrected": f"round {without[-1]['round']}: {without[-1]['drift'].get('reason', '')}"
                if without
                else "",
            }
    return found


def _share(rows: Sequence[Mapping[str, Any]]) -> float | None:
    return round(float(rows[0]["drift"]["share"]), 3) if rows else None
