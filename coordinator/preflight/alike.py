"""Values that must be the same at all facilities: which facility differs, and what the others have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

MOST_NAMED = 4
"""Values of other facilities that a sentence names."""


def others_than_most(values: Mapping[str, str]) -> dict[str, str]:
    """By facility that has something else than more than half of all, what most have, as the end of a sentence.

    Where no value is that of more than half, nobody can say who is odd: all are named, with what the others have.
    """
    counts = Counter(values.values())
    usual, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if 2 * count > len(values):
        return {name: f"most have {usual or 'none'}" for name, value in values.items() if value != usual}
    return {name: f"others have {_named([one for one in counts if one != value])}" for name, value in values.items()}


def _named(values: list[str]) -> str:
    more = len(values) - MOST_NAMED
    return ", ".join(one or "none" for one in values[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
