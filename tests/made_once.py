"""Directories that many tests begin from, each made by the first test of a run that asks, whatever its process."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path


def made_once(tmp_path: Path, name: str, make: Callable[[Path], object]) -> Path:
    """The directory `name` of this run, filled by `make` where no test has asked for it yet. Copy what is to change.

    `tmp_path` is the fixture's: processes of pytest-xdist find the run's directory two levels above it.
    """
    run = tmp_path.parent
    run = run.parent if run.name.startswith("popen-") else run
    place = run / "made-once" / name
    place.parent.mkdir(exist_ok=True)
    with open(f"{place}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            begun = Path(f"{place}.begun")
            shutil.rmtree(begun, ignore_errors=True)  # of a test that was ended
            begun.mkdir()
            make(begun)
            begun.rename(place)
    return place
