"""When a process of this host began, which sets it apart from a later process of the same pid (proc(5))."""

from __future__ import annotations

from pathlib import Path

STATE, START = 0, 19
"""Fields 3 and 22 of /proc/PID/stat, counted from what follows the name of the command."""


def stat_of(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on; the second, a name, may hold spaces. Raises `OSError`."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def started_at(pid: int) -> int | None:
    """Start of a live process in clock ticks since boot; None for one that has ended, a zombie included."""
    try:
        fields = stat_of(pid)
        return None if fields[STATE] in "ZX" else int(fields[START])
    except (OSError, ValueError, IndexError):
        return None
