"""All layouts of a shape that has few: nothing is left to search there, and a plan does not depend on time or luck."""

from __future__ import annotations

import math
from itertools import combinations, permutations

import numpy as np

from coordinator.planning.joint.cost import Cost, Layouts

MOST = 4096
"""Layouts of a shape at most that are all looked at."""


def every_layout(cost: Cost) -> Layouts | None:
    """Each choice and order of devices, each cut and each share of micro-batches; None where these are too many.

    Of replicas in another order the first counts.
    """
    replicas, count = cost.replicas, len(cost.memory)
    further = (cost.stages - 1) * replicas
    number = math.comb(count, replicas) * math.perm(count - replicas, further)
    number *= math.comb(cost.units - 1, cost.stages - 1) * math.comb(cost.micro_batches - 1, replicas - 1)
    if number > MOST:
        return None
    devices = range(count)
    lines = []
    for first in combinations(devices, replicas):
        for rest in permutations([device for device in devices if device not in first], further):
            chosen = [*first, *rest]
            lines.append([*chosen, *(device for device in devices if device not in chosen)])
    cuts = [[0, *inner, cost.units] for inner in combinations(range(1, cost.units), cost.stages - 1)]
    shares = [
        np.diff([0, *inner, cost.micro_batches]).tolist()
        for inner in combinations(range(1, cost.micro_batches), cost.replicas - 1)
    ]
    line, cut, share = (
        index.ravel() for index in np.meshgrid(*(np.arange(len(one)) for one in (lines, cuts, shares)), indexing="ij")
    )
    return Layouts(np.array(lines)[line], np.array(cuts)[cut], np.array(shares)[share])
