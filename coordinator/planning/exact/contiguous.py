"""Assigns layers to devices: contiguous, within memory, minimising the load of the busiest device; exact.

In a given order the optimum is found by parametric search: `greedy` decides any bottleneck value in O(D log U). A
feasible answer lowers the upper end to an attained value, an infeasible one raises the lower end to the smallest value
at which greedy would act differently; both meet at the optimum (Pinar and Aykanat 2004, "Fast optimal load balancing
algorithms for 1D partitioning", JPDC 64(8), section 4, for devices of unequal speed and memory).

With the order free the problem is NP-hard; see `free_order`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.planning.chain import TOLERANCE, Assignment, Chain, greedy, shortage
from coordinator.problem.chain import ChainProblem

Spans = list[tuple[int, int, int]]


def best_in_order(chain: Chain, order: Sequence[int]) -> tuple[Spans, float] | None:
    """Optimal spans for devices in `order` and their bottleneck; None if memory forbids every split."""
    best = greedy(chain, order, np.inf)
    if best is None:
        return None
    high = chain.value(best)
    low = 0.0  # every value below `low` is infeasible
    while low < high * (1 - TOLERANCE):
        # Probe `low` itself when the interval is small against it, so that the search ends on an attained value.
        middle = low if high - low < 1e-3 * high else (low + high) / 2
        spans = greedy(chain, order, middle)
        if spans is not None:
            best, high = spans, chain.value(spans)
            if middle == low:
                break
        else:
            low = max(_next_value(chain, order, middle), np.nextafter(middle, np.inf))
    return best, high


def _next_value(chain: Chain, order: Sequence[int], bottleneck: float) -> float:
    """The least value above `bottleneck` at which `greedy` takes another unit somewhere."""
    position, least = 0, np.inf
    for device in order:
        row = chain.time[device]
        limit = row[position] + bottleneck * (1 + TOLERANCE) + TOLERANCE * row[-1]
        end = int(np.searchsorted(row, limit, side="right")) - 1
        by_memory = int(chain.memory_reach[device, position])
        if end < by_memory:
            least = min(least, float(row[end + 1] - row[position]))
        position = max(position, min(end, by_memory))
    return least


def plan_exact_in_order(problem: ChainProblem, order: Sequence[int] | None = None) -> Assignment:
    """The optimum for a given order of devices (default: as numbered); raises `Infeasible`."""
    chain = Chain(problem)
    order = list(range(chain.devices)) if order is None else list(order)
    found = best_in_order(chain, order)
    if found is None:

        def fits(extra: float) -> bool:
            wider = Chain(problem)
            wider.limit = chain.limit + extra
            return greedy(wider, order, np.inf) is not None

        raise shortage(chain, order, fits)
    spans, value = found
    return Assignment(
        spans=tuple(spans),
        bottleneck=value,
        lower_bound=value,
        proven=True,
        reasons=("optimal for the given order of devices: parametric search closed the interval",),
    )
