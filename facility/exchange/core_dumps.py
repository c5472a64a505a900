"""Core dumps of processes that hold keys: a file in a job's directory, with all that was in memory."""

from __future__ import annotations

import resource
from contextlib import suppress


def leave_no_core() -> None:
    """Let this process, and those that it starts from now on, leave no core dump (setrlimit(2)).

    Where the system hands cores to a program (core(5)), that program is given the limit, and heeds it or not.
    """
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
