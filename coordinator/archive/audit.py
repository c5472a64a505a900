"""The coordinator's audit log, `audit.jsonl` in the archive: what was received, its signature, what was refused.

Chained line by line (`facility.exchange.files.audit_log`), so that `crossfed audit verify` finds an altered line; a log
that was cut short lacks heads that signed models carried to the facilities.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from facility.exchange.errors import InputError
from facility.exchange.files import audit_log
from facility.exchange.json_text import object_in
from facility.exchange.messages.audit_compare import head_of

log = logging.getLogger(__name__)

NAME = "audit.jsonl"
VARIABLE = "CROSSFED_ARCHIVE_LOG"
"""Environment variable with the log's path, for the coordinator's own steps; unset: no log is kept."""


def log_entry(what: str, **fields: Any) -> None:
    """A line in the log, where one is kept. A log that cannot be written is reported and stops no round."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        audit_log.append(Path(path), what, **fields)
    except OSError as error:
        log.error("the audit log %s cannot be written: %s", path, error)


def log_head() -> str:
    """Digest of the log's last line; '' where there is none."""
    path = os.environ.get(VARIABLE)
    return audit_log.head_digest(Path(path)) if path else ""


def heads_of(archive: Path, facility: str) -> list[str]:
    """Heads of a facility's log that its updates' manifests carried, from the coordinator's log in `archive`.

    Raises `InputError` where that log is broken, for then its word counts nothing, and where it has no such head.
    """
    log = Path(archive) / NAME
    head_of(log)
    found = [entry for line in log.read_bytes().split(b"\n") if (entry := object_in(line) or {}).get("facility_head")]
    heads = [str(entry["facility_head"]) for entry in found if entry.get("facility") == facility]
    if not heads:
        known = ", ".join(sorted({str(entry.get("facility")) for entry in found})) or "no facility"
        raise InputError(f"{log} holds heads of the logs of {known}, none of {facility!r}: there is nothing to compare")
    return heads
