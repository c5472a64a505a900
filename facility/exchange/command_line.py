"""What a command line may not hold: an option without a value, and one that has no effect beside the others."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable, Sequence
from functools import partial

from facility.exchange.errors import InputError


def parse_arguments(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options in `words`, else in the process's own command line. Raises `InputError` for one that is empty."""
    words = sys.argv[1:] if words is None else words
    for kind in (int, float):
        parser.register("type", kind, partial(_number, kind))
    refuse_empty(words)
    return parser.parse_args(words)


def _number(kind: type[int] | type[float], word: str) -> float:
    """Raises `ArgumentTypeError` in words; argparse's own message names Python's type."""
    try:
        return kind(word)
    except ValueError:
        from facility.exchange.text import KINDS  # imports pydantic, which a command may do without

        raise argparse.ArgumentTypeError(f"{word!r} given, expected {KINDS[kind]}") from None


def refuse_empty(words: Iterable[str]) -> None:
    """Raise `InputError` for an empty word or option before `--`: of an unset variable of the shell, a command made its
    default, and did something else than was meant."""
    option = "an argument"
    for word in words:
        if word == "--":
            return
        name, sign, value = word.partition("=")
        if word.startswith("-"):
            option = name
        if not word or (sign and not value and name.startswith("--")):
            raise InputError(f"{option} is empty, expected a value: is a variable of the shell not set?")


def changed_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> set[str]:
    """Names of the options whose values are not their defaults."""
    return {name for name, value in vars(options).items() if value != parser.get_default(name)}


def refuse_unused(given: Collection[str], unused: Iterable[str], why: str) -> None:
    """Raise `InputError` for the first of the `unused` options that was given. `why`: what it has no effect beside."""
    for name in unused:
        if name in given:
            raise InputError(f"--{name.replace('_', '-')} has no effect {why}: leave it out")
