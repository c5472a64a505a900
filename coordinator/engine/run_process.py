"""Which process a run is, so that another one here can say whether it still lives, whatever their clocks say."""

from __future__ import annotations

import os
from pathlib import Path

from facility.exchange.process_start import started_at


def this_process() -> str:
    """Boot, pid namespace, pid and start of this process; '' where the system does not say."""
    started = started_at(os.getpid())
    return "" if started is None or not (place := _place()) else f"{place} {os.getpid()} {started}"


def process_lives(process: str) -> bool | None:
    """Whether the process of `this_process` still lives; None: it was of another host, container or boot, or is ''."""
    place, pid, started = ["", "", "", *process.rsplit(" ", 2)][-3:]
    if not place or place != _place():
        return None
    return pid.isdecimal() and started.isdecimal() and started_at(int(pid)) == int(started)


def _place() -> str:
    """What processes have in common that see each other by their pids; '': not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
