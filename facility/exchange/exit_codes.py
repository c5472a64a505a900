"""Exit codes of every command; those by which a job reports to the workflow are in `messages.outcome`."""

from __future__ import annotations

import signal
from enum import IntEnum

BROKE = 255
"""Of ssh itself: the login or the connection failed, or ssh does not know how the command ended."""


class ExitCode(IntEnum):
    """What a command's exit code means."""

    OK = 0
    """Done."""
    FOUND = 1
    """The command worked and found something to fix: a failing row of `crossfed check`, a stale rendered file."""
    INPUT = 2
    """Fix the input; trying again will not help. The reason is one line on stderr."""
    TRANSIENT = 75
    """A transient error (EX_TEMPFAIL of sysexits.h): the same command may succeed later."""
    REFUSED = 77
    """The gate of a facility refuses the request (EX_NOPERM of sysexits.h)."""
    INTERRUPTED = 130
    """Stopped by SIGINT."""
    UNREAD = 141
    """Who read the command's output is gone (`| head -1`): what the shell says of a program that SIGPIPE ended."""


def ended_by_signal(code: int) -> bool:
    """Whether a program with this exit code was ended by a signal: below 0 as Python says so, above 128 as a shell."""
    return code < 0 or code > 128


def name_of_signal(number: int) -> str:
    """`SIGTERM`; of a signal that has no name, as most of the real-time ones, `signal 40`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
