"""What the record of a group keeps of each member's report."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from facility.exchange.messages.report import Report


def figures_of(told: Report) -> dict[str, Any]:
    """Figures by name; the names are those of `coordinator.archive.rounds.FacilityRow`."""
    seconds = asdict(told.seconds)
    return {
        "tokens": told.tokens,
        "seconds": sum(seconds.values()),
        "phases": seconds,
        "tokens_per_second": told.tokens_per_second,
        "perplexity_received": told.perplexity_received,
        "versions": told.versions,
    }
