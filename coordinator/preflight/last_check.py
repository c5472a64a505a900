"""What the last `crossfed check` found to fix, so that `crossfed run` does not begin in spite of it.

Kept in the work directory while the check fails, for this federation.yml as it then was. A login that failed is not
kept: a run waits for one by itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from coordinator.config.federation import Federation
from coordinator.preflight.row import ME, Row
from facility.exchange.files.durable import write_json
from facility.exchange.files.storage import make_private_folder
from facility.exchange.json_values import values_in
from facility.exchange.messages.manifest import sha256_of
from facility.exchange.messages.strict_json import clean_text

FILE = "failing-check.json"
WAITED_FOR = ("connection",)
"""Checks whose failing a run waits out."""
SHOWN = 3


def remember_failures(federation: Federation, digest: str, rows: Sequence[Row]) -> None:
    """Keep the facilities' failing rows; with none, forget those of before. The coordinator's own are checked at every
    run. `digest`: sha256 of the federation.yml that was checked."""
    kept = [
        f"{row.subject}, {row.check}: {row.found}"
        for row in rows
        if row.verdict == "fail" and row.check not in WAITED_FOR and row.subject != ME
    ]
    path = federation.workdir_path / FILE
    with contextlib.suppress(OSError):  # the rows have been shown; a directory that cannot be written is one of them
        path.unlink(missing_ok=True)
        if kept:
            make_private_folder(path.parent)
            write_json(path, {"federation": digest, "time": time.time(), "failing": kept})


def still_failing(federation: Federation, file: Path) -> str:
    """A sentence on what the last check of this federation.yml found; '' where it found nothing, or another file."""
    try:
        found = values_in(federation.workdir_path / FILE)
        if found["federation"] != sha256_of(file):
            return ""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(found["time"])))
        failing = [clean_text(str(one), 300) for one in found["failing"]]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    more = f"; and {len(failing) - SHOWN} more" if len(failing) > SHOWN else ""
    return f"`crossfed check` of {when} failed: {'; '.join(failing[:SHOWN])}{more}"
