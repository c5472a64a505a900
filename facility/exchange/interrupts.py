"""Ctrl-C while a command still imports what it needs: one word, as later on.

Imports take a second or more, in which `exit_on_error` has not been called yet. Imports nothing but `sys`.
"""

from __future__ import annotations

import sys
from types import TracebackType

WORD = "interrupted"
"""What a command says on stderr as Ctrl-C ends it."""
COMMAND = "crossfed"
"""The program that setuptools makes of `coordinator.cli`."""

_before = sys.excepthook


def is_command(name: str) -> bool:
    """True if `name`, `sys.argv[0]` as our packages are imported, is of one of our own commands.

    `-m` stands there while Python looks for the module to run; another's script has its own path there.
    """
    return name == "-m" or name.replace("\\", "/").rpartition("/")[2] in (COMMAND, f"{COMMAND}.exe")


def word_while_importing() -> None:
    """From now on an interrupt that nobody catches is one word, where this process runs one of our commands."""
    if is_command(next(iter(sys.argv), "")):
        sys.excepthook = _hook


def traceback_again() -> None:
    """Undo `word_while_importing`: the output of a job or step is a log file, where its place is of use."""
    if sys.excepthook is _hook:
        sys.excepthook = _before


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print(WORD, file=sys.stderr)
    else:
        _before(kind, error, trace)
