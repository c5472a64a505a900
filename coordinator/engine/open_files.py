"""How many files the engine may have open at once, and what is said where they do not suffice.

A login shell mostly allows 1024 (RLIMIT_NOFILE, getrlimit(2)), though the system would let this account have more. Each
connection, and each pipe of a command that runs at a facility, is one of them.
"""

from __future__ import annotations

import re
import resource

from coordinator.engine.engine_log import error_in

MOST = 65_536
"""That are asked for."""
REFUSED = re.compile(r"\[Errno (?:23|24)\] ")
"""How an error of StreamFlow's own begins that is ENFILE or EMFILE."""


def allow_open_files() -> int:
    """Raise this process's limit, and with it those of all that it starts, as far as it may; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def out_of_files(line: str) -> str:
    """What to do where a line of StreamFlow's log says that it may open no further file; else ''.

    It hangs then: the step that failed so has said nothing, and nothing else moves.
    """
    if not REFUSED.match(error_in(line) or ""):
        return ""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"StreamFlow may open no further file (at most {limit} here): have the limit on open files raised "
        "(`ulimit -Hn`, limits.conf(5)), or end other programs of this machine"
    )
