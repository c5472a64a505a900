"""Durations as tables, reports and messages show them."""

from __future__ import annotations


def format_duration(seconds: float) -> str:
    """`0.4 s`, `42 s`, `3:07 min`, `2:30 h`; a whole number of minutes or hours stands alone: `10 min`, `2 h`.

    A negative time, as of two clocks that differ, is none.
    """
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{round(seconds, 1):g} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    unit, large, rest = ("min", *divmod(whole, 60)) if whole < 6000 else ("h", *divmod(whole, 3600))
    if not rest:
        return f"{large:,} {unit}"
    return f"{large}:{rest:02d} min" if unit == "min" else f"{large:,}:{rest // 60:02d} h"
