"""Which rounds were made from sums alone (secure aggregation), as the archive's records say: data and one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.archive.rounds import RoundFile


def masked_rounds(history: Sequence[RoundFile]) -> dict[str, Any]:
    """How many rounds were masked and of how many updates the smallest sum was; empty where none was masked."""
    found = [entry.aggregation.get("details", {}).get("masking") for entry in history]
    told = [one for one in found if one]
    if not told:
        return {}
    return {
        "rounds": len(told),
        "all_rounds": len(history),
        "bits": told[-1]["bits"],
        "threshold": told[-1]["threshold"],
        "smallest_sum": min(len(one["survivors"]) for one in told),
    }


def masked_sentence(told: Mapping[str, Any]) -> str:
    """For a person."""
    return (
        f"secure aggregation in {told['rounds']} of {told['all_rounds']} rounds ({told['bits']} bits): the coordinator "
        f"learnt sums of {told['smallest_sum']} updates or more, unmasked by at least {told['threshold']} facilities"
    )
