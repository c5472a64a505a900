"""Types of a benchmark's arguments: what it cannot measure is refused at once, before minutes of work."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable


def at_least(least: int) -> Callable[[str], int]:
    """A whole number of `least` or more."""

    def parsed(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"found {text!r}, expected a whole number of {least} or more")
        return int(text)

    return parsed


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Some of the known names, by commas."""
    expected = list(known)

    def parsed(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in expected]:
            raise ArgumentTypeError(f"found {unknown[0]!r}, expected of {', '.join(expected)}, by commas")
        return text.split(",")

    return parsed
