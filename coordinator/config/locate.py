"""Find the federation of the working directory."""

from __future__ import annotations

from pathlib import Path

from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.files.bounded import real_path

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


def named_in_utf8(file: Path) -> Path:
    """The file's whole path. Raises `ConfigurationError` for one with bytes that are not UTF-8: they cannot be written
    into streamflow.yml and JSON, which name the places of a run."""
    path = real_path(file)
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"the path {ascii(str(path))} holds bytes that are not UTF-8 (shown as \\udcXX), expected a path that can "
            "be written into a text file: rename that folder, or move the federation elsewhere"
        ) from None
    return path
