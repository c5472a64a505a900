"""What the commands of a round may remove at their `--out`: what an earlier attempt at the round left there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from facility.exchange.errors import InputError
from facility.exchange.files.storage import file_error_sentence
from facility.exchange.messages.manifest import manifest_if_any
from facility.exchange.messages.report import FAILURE

UPDATE = "update"
"""The name in a job's working directory that the workflow gives; a trainer that was killed may have left anything."""


def check_replaced(out: Path) -> None:
    """Raise `InputError` where something lies at `out` that no earlier attempt at a round left.

    It would be removed, for a round writes its update or the reason of its failure there, whatever else is wrong.
    """
    place, here = Path(os.path.abspath(out)), Path.cwd()
    if place == here / UPDATE:
        return
    if here.is_relative_to(place):
        raise InputError(f"--out {out} is, or holds, the working directory, which would be removed; choose a new name")
    try:
        mode = os.lstat(place).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(file_error_sentence(error)) from None
    if not (stat.S_ISDIR(mode) and _left(place)):
        raise InputError(
            f"--out {out} is there, and neither empty nor what an earlier round left (an update or {FAILURE}): it "
            "would be removed; choose another name"
        )


def _left(place: Path) -> bool:
    if not any(place.iterdir()) or (place / FAILURE).is_file():
        return True
    found = manifest_if_any(place)
    return found is not None and found.facility is not None
