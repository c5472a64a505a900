"""Which rounds were made from sums alone (secure aggregation), as the archive's records say: data and one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.archive.rounds import RoundFile
from facility.exchange.text import number_of


def masked_rounds(history: Sequence[RoundFile]) -> dict[str, Any]:
    """How many rounds were masked and of how many updates the smallest sum was; empty where none was masked."""
    found = [entry.aggregation.get("details", {}).get("masking") for entry in history]
    masked = [one for one in found if one]
    if not masked:
        return {}
    return {
        "rounds": len(masked),
        "all_rounds": len(history),
        "bits": masked[-1]["bits"],
        "threshold": masked[-1]["threshold"],
        "smallest_sum": min(len(one["survivors"]) for one in masked),
    }


def masked_sentence(sums: Mapping[str, Any]) -> str:
    """A sentence for a person on the masked sums of the rounds."""
    return (
        f"secure aggregation in {sums['rounds']} of {number_of(sums['all_rounds'], 'round')} ({sums['bits']} bits): "
        f"the coordinator learnt sums of {sums['smallest_sum']} updates or more, unmasked by at least "
        f"{sums['threshold']} facilities"
    )
