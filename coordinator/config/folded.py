"""What facilities have in common, written once: coordinator.json holds federation.yml as it describes each of them.

Every step reads that file, so that with N facilities it is read at least N times a round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

COMMON = "common"
"""Beside `federation` and `facilities` in a folded description: what all facilities have alike."""


def fold_description(described: Mapping[str, Any]) -> dict[str, Any]:
    """A description (`coordinator.config.described`) in which what is alike in all facilities is written once."""
    facilities: Mapping[str, Mapping[str, Any]] = described["facilities"]
    texts = [{key: json.dumps(value, sort_keys=True) for key, value in one.items()} for one in facilities.values()]
    alike = set.intersection(*(set(one.items()) for one in texts)) if texts else set()
    common = {key for key, _ in alike}
    first = next(iter(facilities.values()), {})
    own = {name: {key: one[key] for key in one if key not in common} for name, one in facilities.items()}
    return {**described, COMMON: {key: first[key] for key in first if key in common}, "facilities": own}


def unfold_description(described: Any) -> Any:
    """The description itself; one that is not folded, and what is none, as it is."""
    if not isinstance(described, Mapping) or COMMON not in described:
        return described
    common, facilities = described[COMMON], described["facilities"]
    whole = {name: dict(sorted((common | one).items())) for name, one in facilities.items()}
    return {key: value for key, value in described.items() if key != COMMON} | {"facilities": whole}
