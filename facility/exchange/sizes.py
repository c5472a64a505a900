"""Sizes in the words of tables, reports and messages."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Bytes in three digits: `560 B`, `2.05 kB`, `1 GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(count) < 999.5:  # rounds to at most 999
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} EB"
