"""Many facilities in few lines: one line for all to which the same happened, with some of their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

MOST_ROWS = 24
"""Facilities that are listed one by one."""
NAMED = 3
"""Facilities by name in a line that stands for more."""

T = TypeVar("T")


def names_of(names: Sequence[str], most: int = NAMED) -> str:
    """The first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def kind_of(text: str, name: str) -> str:
    """What a sentence about a facility says, whichever facility it is about: without its name, and without numbers."""
    return re.sub(r"\d+", "0", text.replace(name, ""))


def groups_of(found: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    """What has the same key together, largest group first; equally large ones in their order."""
    groups: dict[object, list[T]] = {}
    for one in found:
        groups.setdefault(key(one), []).append(one)
    return sorted(groups.values(), key=len, reverse=True)
