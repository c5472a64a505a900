"""Which rounds of its run `crossfed rewind` has set aside, in the manifest of every model that was made since."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from facility.exchange.messages.manifest import Manifest, read_manifest, with_extra
from facility.exchange.messages.plausible import MOST_ROUNDS

KEY = "set_aside"
"""In a manifest's `extra`: by the name of a rewind, the first round that it set aside. Absent: there was none."""
MOST = 1000
"""Rewinds."""
LONGEST = 100
"""Characters of a name."""


def set_aside(received: Manifest) -> dict[str, int]:
    """What the sender of a model says; {} where that is nothing sensible."""
    found = received.extra.get(KEY)
    if not isinstance(found, dict) or len(found) > MOST:
        return {}
    sensible = all(
        len(name) <= LONGEST and type(first) is int and 0 <= first <= MOST_ROUNDS for name, first in found.items()
    )
    return dict(found) if sensible else {}


def with_set_aside(directory: Path, rewinds: Mapping[str, int]) -> None:
    """Write the rewinds into the manifest of a model or message, unless it holds them already."""
    if set_aside(read_manifest(directory)) != rewinds:
        with_extra(directory, KEY, dict(rewinds))
