"""What messages say of a record: the kind and size of a value, never its text, which is somebody's document.

Messages go into logs, and what `crossfed setup` shows of a facility is read where its documents must not go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from facility.exchange.logs import escape_controls
from facility.exchange.text import KINDS, number_of

MOST_NAMES = 20
MOST_CHARACTERS = 40
"""Of the name of a field or class: a longer one is rather a document, in a table whose first row became its head."""


def kind_of(value: Any) -> str:
    """What a value is: `a text of 12 characters`, `a list of 3`, `an object with text, label`, `null`."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"a text of {number_of(len(value), 'character')}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value):,}"
    if isinstance(value, dict):
        return f"an object with {names_in(value)}"
    return KINDS.get(type(value), f"of the type {type(value).__name__}")


def name_of(value: Any) -> str:
    """A role, a class or a weight as it is, quoted where it is a text; of what is too long for one, its kind."""
    short = isinstance(value, str) and len(value) <= MOST_CHARACTERS
    return repr(value) if short or isinstance(value, bool | int | float) else kind_of(value)


def names_in(names: Iterable[Any]) -> str:
    """The names of fields in one line; of a long one its length, and of many the first ones."""
    listed = [str(name) for name in names]
    shown = [name if len(name) <= MOST_CHARACTERS else f"({kind_of(name)})" for name in listed]
    return first_of(shown, MOST_NAMES) or "no field"


def summary_of_classes(classes: Sequence[str]) -> str:
    """A line with the names of classes, which are values of a field: of a wrong one they are documents."""
    return f"  {len(classes)} classes: {escape_controls(names_in(classes))}"


def first_of(words: Sequence[str], most: int) -> str:
    """The first words in one line, and how many more there are; empty where there are none."""
    more = [f"{len(words) - most:,} more"] * (len(words) > most)
    return ", ".join([*words[:most], *more])
