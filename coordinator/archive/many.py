"""Many facilities in few lines: one line for all to which the same happened, with some of their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
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


def too_many_to_list(found: Collection[object]) -> bool:
    """Whether these are too many to be listed one by one."""
    return len(found) > MOST_ROWS


def group_for_display(found: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    """Groups for one line each: few items stay single, in their order; many are grouped by key, the largest group
    first, equally large ones in their order."""
    every = list(found)
    if not too_many_to_list(every):
        return [[one] for one in every]
    groups: dict[object, list[T]] = {}
    for one in every:
        groups.setdefault(key(one), []).append(one)
    return sorted(groups.values(), key=len, reverse=True)


def first_groups(groups: Sequence[list[T]]) -> tuple[list[list[T]], list[T]]:
    """As many groups as are listed, and what is in all others."""
    return list(groups[:MOST_ROWS]), [one for group in groups[MOST_ROWS:] for one in group]
