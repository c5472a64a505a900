"""JSON as plain values, from any text or from a file of our own; whatever is wrong with it is a `ValueError`.

Messages between institutions are read by `facility.exchange.messages.strict_json`, which also bounds what they hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from facility.exchange.files.bounded import read_bounded

MOST_BYTES = 256 << 20
"""Of a file, unless its reader expects less."""


def parse_values(text: str | bytes, **options: Any) -> Any:
    """As `json.loads`, whose `RecursionError` for deep nesting is a `ValueError` here, like every other refusal."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("lists or mappings are nested too deep") from None


def values_in(path: Path) -> Any:
    """The value in a file of our own. Raises `OSError` where it cannot be read, `ValueError` where it is not JSON."""
    return parse_values(read_bounded(path, MOST_BYTES).decode())


def note_in(path: Path) -> Any:
    """The value in a file of our own that a reader can do without; None where it is missing, or damaged."""
    try:
        return values_in(path)
    except (OSError, ValueError):
        return None


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
