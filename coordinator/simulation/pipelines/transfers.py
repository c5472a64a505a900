"""Many transfers over one link: max-min fair, each limited by its own end too."""

from __future__ import annotations

import numpy as np

from coordinator.simulation.pipelines.layout import Array


def level(caps: Array, capacity: float) -> float:
    """The rate L such that the sum of min(cap, L) is `capacity`; infinite where the caps ask for less."""
    if caps.sum() <= capacity:
        return float("inf")
    rising = np.sort(caps)
    before = np.concatenate([[0.0], np.cumsum(rising)[:-1]])
    levels = (capacity - before) / np.arange(len(rising), 0, -1)
    return float(levels[np.argmax(levels <= rising)])


def finish_times(begin: Array, sizes: Array, caps: Array, capacity: float) -> Array:
    """The end time of each transfer. `begin`: seconds; `sizes`: bytes; `caps`: bytes per second of its own end.

    Where the link is never full, that is begin + size / cap at once; otherwise rates change whenever a transfer begins
    or ends.
    """
    alone = begin + sizes / caps
    if not np.isfinite(capacity) or len(begin) == 0:
        return alone
    moments = np.concatenate([begin, alone])
    order = np.lexsort((np.concatenate([np.ones(len(begin)), np.zeros(len(begin))]), moments))
    load = np.cumsum(np.concatenate([caps, -caps])[order])
    if load.max() <= capacity * (1 + 1e-12):
        return alone
    end = np.full(len(begin), np.nan)
    left = sizes.astype(float).copy()
    arrivals = np.argsort(begin, kind="stable")
    active = np.zeros(len(begin), dtype=bool)
    position, now = 0, float(begin[arrivals[0]])
    while position < len(arrivals) or active.any():
        if not active.any():
            now = max(now, float(begin[arrivals[position]]))
        while position < len(arrivals) and begin[arrivals[position]] <= now:
            active[arrivals[position]] = True
            position += 1
        chosen = np.flatnonzero(active)
        rates = np.minimum(caps[chosen], level(caps[chosen], capacity))
        due = now + left[chosen] / rates
        following = float(due.min())
        if position < len(arrivals):
            following = min(following, float(begin[arrivals[position]]))
        left[chosen] -= rates * (following - now)
        ended = chosen[due <= following * (1 + 1e-15) + 1e-12]
        end[ended] = following
        active[ended] = False
        now = following
    return end
