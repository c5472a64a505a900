"""The console that a command prints tables on. It knows nothing of what is printed."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console


def command_console(width: int, stream: TextIO | None = None) -> Console:
    """A console on `stream`, else on standard output; `:name:` in a table stays text.

    `width`: in characters, where standard output is no terminal and so has none.
    """
    return Console(file=stream, width=None if sys.stdout.isatty() else width, emoji=False)
