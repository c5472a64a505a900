"""Coordinators in a tree: each takes at most `fan_in` updates or partial sums, and hands one partial sum on.

Facilities are grouped in their order; each group has a coordinator, groups of coordinators have theirs, up to one. A
model goes down by store and forward, and every coordinator has the same link. A partial sum is of whole numbers
(docs/explanation/large.md), so that the tree's model has the bits of one coordinator's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.simulation.pipelines.transfers import finish_times

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Tree:
    """How the work of one coordinator is parted."""

    fan_in: int
    capacity: float
    """Bytes per second of each coordinator's link, each direction; infinite: not limited."""
    model: float
    """Bytes that go down."""
    partial: float
    """Bytes of a partial sum, which go up between coordinators."""
    seconds: float
    """Of a coordinator, after its last update."""
    seconds_per_update: float

    def levels(self, facilities: int) -> list[int]:
        """Coordinators on each level, from those that facilities talk to up to the one at the top."""
        counts = [math.ceil(facilities / self.fan_in)]
        while counts[-1] > 1:
            counts.append(math.ceil(counts[-1] / self.fan_in))
        return counts

    def model_delay(self, facilities: int) -> float:
        """Seconds until the coordinators of facilities have the model that the top one has."""
        above = self.levels(facilities)[:-1]
        each = self.model / self.capacity
        return sum(each * min(self.fan_in, count) for count in above)

    def transfers(self, begin: Array, size: float, own: Array) -> Array:
        """End of each facility's transfer with its group's coordinator. `own`: bytes per second of its own end."""
        ends = [
            finish_times(begin[group], np.full(len(begin[group]), size), own[group], self.capacity)
            for group in self._groups(len(begin))
        ]
        return np.concatenate(ends)

    def finished(self, arrivals: Array) -> float:
        """When the top coordinator has the next model, updates having arrived at those of their groups."""
        while True:
            groups = self._groups(len(arrivals))
            done = [
                float(arrivals[group].max()) + self.seconds + self.seconds_per_update * len(arrivals[group])
                for group in groups
            ]
            if len(done) == 1:
                return done[0]
            speeds = np.full(len(done), min(self.capacity, 1e15))
            arrivals = self.transfers(np.array(done), self.partial, speeds)

    def _groups(self, count: int) -> list[slice]:
        return [slice(start, start + self.fan_in) for start in range(0, count, self.fan_in)]
