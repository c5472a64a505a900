"""A bandwidth from messages that stand out of the noise of pings, or a figure that is too low rather than too high.

A message of n bytes and its answer take a round trip and n / bandwidth. The bandwidth is n over the difference of two
times, each with the noise of a busy machine, and near zero that difference says nothing: so messages grow until it is
larger than that noise. Where even the largest does not stand out, the round trip is counted with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from facility.exchange.errors import TransientError

SMALLEST = 64 * 2**10
"""Bytes of the first message."""
SHARE = 0.1
"""Of a message's seconds that must be left without the round trip: no bandwidth is more than ten times what a message
got with its round trip counted."""
SPREADS = 4.0
"""Differences of this many spreads of the pings stand out."""
SLOW_SECONDS = 0.25
"""A link that takes so long for one message is known well enough after it."""


@dataclass(frozen=True, kw_only=True)
class SharpTimes:
    """When a message is large enough."""

    target_seconds: float = 0.02
    """A bandwidth is taken from a message that takes at least so long, if `most_bytes` allow."""
    most_bytes: int = 64 * 2**20
    repeats: int = 3
    """Messages of that size; the fastest counts."""


@dataclass(frozen=True, kw_only=True)
class Trips:
    """Seconds of pings and their answers."""

    median: float
    least: float

    @property
    def spread(self) -> float:
        return max(0.0, self.median - self.least)

    def without(self, flow: float) -> float | None:
        """What a message of `flow` seconds took without its round trip; None where that is lost in the noise."""
        left = flow - max(0.0, self.least)
        return left if left > 0 and left >= max(SPREADS * self.spread, SHARE * flow) else None


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """A measured one."""

    bytes_per_second: float
    stands_out: bool
    """False: round trips are counted with it, so the link may be faster."""


def measure_bandwidth(
    flow: Callable[[int], float], agree: Callable[[int], int], trips: Trips, sharp: SharpTimes
) -> Bandwidth:
    """Grow the message until its time stands out of the noise, then take the fastest of some.

    `flow`: seconds of a message of a number of bytes; `agree`: makes both sides use the sender's number.
    Raises `TransientError` where the clock does not advance.
    """
    size, flows = SMALLEST, list[float]()
    while following := agree(_next_size(size, flow(size), trips, sharp)):
        size = following
    for number in range(sharp.repeats):
        flows.append(flow(size))
        if not agree(int(number + 1 < sharp.repeats and flows[-1] < SLOW_SECONDS)):
            break
    fastest = min((one for one in flows if one > 0 and math.isfinite(one)), default=0.0)
    if not fastest or not math.isfinite(size / fastest):
        raise TransientError(
            f"a message of {size} bytes took {flows} seconds: this clock measures nothing; measure again"
        )
    left = trips.without(fastest)
    return Bandwidth(bytes_per_second=size / (left or fastest), stands_out=left is not None)


def _next_size(size: int, flow: float, trips: Trips, sharp: SharpTimes) -> int:
    """A larger message, or 0 where this one is enough."""
    left = trips.without(flow)
    if size >= sharp.most_bytes or (left is not None and left >= sharp.target_seconds):
        return 0
    grown = size * (16.0 if left is None else min(16.0, max(2.0, 1.2 * sharp.target_seconds / left)))
    return min(sharp.most_bytes, int(grown))
