"""Panics of libraries written in Rust, tokenizers for one: no `Exception`, and no process can hand them to another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from facility.exchange.errors import InputError, first_line

PANIC = "PanicException"
"""Its name; the module that it says it is of is none."""


@contextmanager
def panics_refused(what: str) -> Iterator[None]:
    """Raise `InputError` of `what` where a library panics in the block: a file that it was given is damaged, or meant
    to do that."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != PANIC:
            raise
        raise InputError(f"{what} cannot be used: {first_line(error)}; copy it again from where it came from") from None
