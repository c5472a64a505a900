"""How often Python looks for garbage in the engine's process.

A run keeps its steps, ports and tokens to its end, more with every facility and round, and leaves little garbage in
cycles. By default Python goes through the newest objects after every 700, and through all of them whenever a quarter is
new: tasks that only wait count as new, so that it does so again and again, and each time takes longer.
"""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 20, 10)
"""New objects before the newest are gone through; times that before older ones are, and those before all are."""


def look_less_often() -> None:
    """Set the thresholds, unless somebody has set others than Python's own."""
    if gc.get_threshold() == (700, 10, 10):
        gc.set_threshold(*THRESHOLDS)
