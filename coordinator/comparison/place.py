"""Where models that are compared lie in the archive."""

from __future__ import annotations

from pathlib import Path

from coordinator.archive.rounds import COMPARED, Archive


def place(archive: Archive) -> Path:
    """Empty again once the comparison is over."""
    return archive.path / COMPARED
