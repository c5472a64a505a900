"""Find the federation of the working directory."""

from __future__ import annotations

from pathlib import Path

from facility.exchange.errors import InputError

PLACES = ("federation.yml", "workflow/federation.yml")
"""Where a federation's file may be, relative to the working directory."""


def find_federation() -> Path:
    """The federation.yml of the working directory. Raises `InputError` that says how to name or make one."""
    here = Path.cwd()
    for place in PLACES:
        if (here / place).is_file():
            return here / place
    raise InputError(
        f"there is no {' and no '.join(PLACES)} in {here}: change to a federation's folder, name its file by "
        "--federation FILE, or make one by `crossfed init FOLDER --facility NAME=TEMPLATE` "
        "(`crossfed demo` makes and runs an example)"
    )
