"""Kinds of text in settings: names that may become folder names, paths and patterns on one line; counts and limits."""

from __future__ import annotations

import re
from decimal import ROUND_DOWN, Context
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
NAME_WORDS = "expected 1-63 letters, digits, dots, hyphens or underscores, the first a letter or digit"
"""What `NAME` takes, for a message."""
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Characters that would leave the line or the script in which a text is written."""

KINDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
"""What a person who writes a file calls these types."""


def number_of(count: int, one: str, several: str = "") -> str:
    """`1 round`, `2 rounds`. `several`: the plural where it is not `one` with an s."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def rounded_down(value: float) -> float:
    """A positive number in two digits, not above it: what a message advises as the most is not refused in its turn."""
    return float(Context(prec=2, rounding=ROUND_DOWN).create_decimal(repr(value)))


def _name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise ValueError(f"{NAME_WORDS}: a name, not a path")
    return value


def one_line(value: str) -> str:
    """The text itself. Raises `ValueError` where it holds a line break or another control character."""
    if found := CONTROL.search(value):
        raise ValueError(f"expected one line of text, but it holds the control character {found[0]!r}: remove it")
    return value


def _given(value: str) -> str:
    if not value.strip():
        raise ValueError("expected the path of a prepared dataset")
    if value.startswith("$"):
        raise ValueError("expected the path of a prepared dataset, written out: variables are not replaced")
    return one_line(value)


def _pattern(value: str) -> str:
    if not value:
        raise ValueError("expected a glob pattern")
    return one_line(value)


Name = Annotated[str, AfterValidator(_name), WithJsonSchema({"type": "string", "pattern": f"^{NAME.pattern}$"})]
"""Of a federation or facility: safe as a folder's name, in job names and in paths."""
Line = Annotated[str, AfterValidator(one_line)]
DatasetPath = Annotated[str, AfterValidator(_given)]
Pattern = Annotated[str, AfterValidator(_pattern)]
