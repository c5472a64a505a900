"""JSON as plain values, from any text; whatever is wrong with it is a `ValueError`.

Messages between institutions are read by `facility.exchange.messages.strict_json`, which also bounds what they hold.
"""

from __future__ import annotations

import json
from typing import Any


def parse_values(text: str | bytes, **options: Any) -> Any:
    """As `json.loads`, whose `RecursionError` for deep nesting is a `ValueError` here, like every other refusal."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("lists or mappings are nested too deep") from None


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook`: raises `ValueError` where a key is repeated."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice in one mapping")
    return result


def object_in(line: bytes) -> dict[str, Any] | None:
    """The object in a line of a log; None for a line that was cut off, or holds something else."""
    try:
        found = parse_values(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
