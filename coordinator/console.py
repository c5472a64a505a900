"""The console that a command prints tables on, and what it says meanwhile. It knows nothing of what is printed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console

TOLD_SECONDS = 10.0
"""Between two lines of a command that has nothing else to say."""


def command_console(width: int, stream: TextIO | None = None) -> Console:
    """A console on `stream`, else on standard output; `:name:` in a table stays text.

    `width`: in characters, where standard output is no terminal and so has none.
    """
    return Console(file=stream, width=None if sys.stdout.isatty() else width, emoji=False)


@contextmanager
def told_meanwhile(sentence: str) -> Iterator[None]:
    """Print the sentence on stderr every `TOLD_SECONDS` until the block ends, which an interrupt ends at once."""
    end = threading.Event()

    def tell() -> None:
        while not end.wait(TOLD_SECONDS):
            print(sentence, file=sys.stderr, flush=True)

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        end.set()
