"""How much the gate's log may grow within a day: every request adds a line, and nobody but the site removes one.

The log itself is not rotated, so that its chain stays one file that can be verified. What it held as the day began is
noted beside it; beyond the policy's `log_bytes_per_day` nothing is done, and nothing written but one line that says so.
"""

from __future__ import annotations

import time
from pathlib import Path

from facility.exchange.files.durable import write_json
from facility.exchange.json_values import note_in
from facility.gating.ledger import DAY
from facility.gating.refusal import Refused

NOTE = "log-share.json"


class LogFull(Refused):
    """The day's share of the log is used up; `told`: the log says so already."""

    def __init__(self, reason: str, *, told: bool) -> None:
        super().__init__(reason)
        self.told = told


def check_log_share(log: Path, most: int, now: float | None = None) -> None:
    """Raise `LogFull` where the log has grown by more than `most` bytes since the day (UTC) began."""
    number = int((time.time() if now is None else now) // DAY)
    size = log.stat().st_size if log.exists() else 0
    path = log.with_name(NOTE)
    note = note_in(path) or {}
    if note.get("day") != number or not 0 <= note.get("size", -1) <= size:
        write_json(path, {"day": number, "size": size})
        return
    if size - note["size"] < most:
        return
    told = bool(note.get("told"))
    if not told:
        write_json(path, note | {"told": True})
    raise LogFull(
        f"the gate's log has grown by {size - note['size']} bytes today (UTC), the policy's log_bytes_per_day is "
        f"{most}: nothing more is done before {time.strftime('%Y-%m-%d', time.gmtime((number + 1) * DAY))}",
        told=told,
    )
