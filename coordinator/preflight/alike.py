"""What all facilities must have alike: who has something else than most."""

from __future__ import annotations

from collections.abc import Mapping


def others_than_most(values: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The value that most facilities have ('' where there is none), and by facility those that are another."""
    usual = max(values.values(), key=list(values.values()).count, default="")
    return usual, {name: value for name, value in values.items() if value != usual}
