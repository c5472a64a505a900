"""Layers in a row (a chain of units) cut into contiguous spans, one for each device of a pipeline.

What an assignment is and costs, the greedy one for an order of devices and a bound on the slowest (the bottleneck), and
why none exists. How an order is found: `coordinator.planning.exact`, `coordinator.planning.joint`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from coordinator.problem.chain import ChainProblem
from facility.exchange.errors import InputError
from facility.exchange.sizes import format_bytes

TOLERANCE = 1e-12
"""Relative slack of comparisons between sums of the same floats added in another order."""


class Infeasible(InputError):
    """No plan keeps within the memory of the devices; the message says which memory is short by how much."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Devices in chain order with their spans; devices not named hold nothing."""

    spans: tuple[tuple[int, int, int], ...]
    """(device, first unit, end unit), contiguous from 0 to the last unit."""
    bottleneck: float
    """Seconds of the busiest device."""
    lower_bound: float
    """No assignment is faster."""
    proven: bool
    """The bound is the optimum's."""
    reasons: tuple[str, ...] = ()
    tried: tuple[dict[str, Any], ...] = field(default_factory=tuple)


class Chain:
    """A `ChainProblem` with its prefix sums: seconds and bytes of any span in constant time."""

    def __init__(self, problem: ChainProblem) -> None:
        self.problem = problem
        self.unit_seconds = seconds = np.array(problem.seconds, dtype=float)
        self.devices, self.units = seconds.shape
        self.time = np.concatenate([np.zeros((self.devices, 1)), np.cumsum(seconds, axis=1)], axis=1)
        self.bytes = np.concatenate([[0.0], np.cumsum(np.array(problem.unit_bytes, dtype=float))])
        self.limit = np.array(problem.memory_bytes, dtype=float)

    @cached_property
    def classes(self) -> list[list[int]]:
        """Devices that are equal in speed and memory, grouped; each group is represented by its first."""
        groups: dict[bytes, list[int]] = {}
        for device in range(self.devices):
            key = self.time[device].tobytes() + self.limit[device].tobytes()
            groups.setdefault(key, []).append(device)
        return list(groups.values())

    @cached_property
    def memory_reach(self) -> np.ndarray:
        """[device, first] -> furthest end that fits the device's memory."""
        slack = TOLERANCE * self.bytes[-1]
        return np.stack([np.searchsorted(self.bytes, self.bytes + m + slack, side="right") - 1 for m in self.limit])

    def reach(self, device: int, bottleneck: float) -> np.ndarray:
        """[first] -> furthest end that `device` can take within `bottleneck` seconds and its memory."""
        row = self.time[device]
        by_time = np.searchsorted(row, row + bottleneck * (1 + TOLERANCE) + TOLERANCE * row[-1], side="right") - 1
        return np.minimum(by_time, self.memory_reach[device])

    def seconds(self, device: int, first: int, end: int) -> float:
        return float(self.time[device, end] - self.time[device, first])

    def bytes_of(self, first: int, end: int) -> float:
        return float(self.bytes[end] - self.bytes[first])

    def value(self, spans: Sequence[tuple[int, int, int]]) -> float:
        """Seconds of the busiest device; checks that every unit is held exactly once and memory is kept."""
        position, used = 0, set()
        for device, first, end in spans:
            assert first == position and end > first and device not in used, spans
            assert self.bytes_of(first, end) <= self.limit[device] * (1 + 1e-9), (device, first, end)
            position = end
            used.add(device)
        assert position == self.units, spans
        return max(self.seconds(*span) for span in spans)

    @cached_property
    def fluid_bound(self) -> float:
        """Lower bound in seconds for a divisible chain: total work over total speed, in the best weights of one device.

        For devices that differ by one factor only, this is sum(f) / sum(1 / t). For devices that differ by kind of
        unit, the cheapest device of each unit gives a weaker bound that still holds.
        """
        costs = self.unit_seconds
        total = self.time[:, -1]
        if (total <= 0).any():
            return 0.0
        shares = costs / total[:, None]
        if np.allclose(shares, shares[0], rtol=1e-9, atol=1e-15):
            return float(1.0 / (1.0 / total).sum())
        return float(costs.min(axis=0).sum() / self.devices)


def greedy(chain: Chain, order: Sequence[int], bottleneck: float) -> list[tuple[int, int, int]] | None:
    """Furthest-reaching spans for devices in the given order, or None if they do not reach the end.

    Taking as much as possible is never worse: what is feasible for a span is feasible for every part of it.
    """
    position, spans = 0, []
    for device in order:
        row = chain.time[device]
        limit = row[position] + bottleneck * (1 + TOLERANCE) + TOLERANCE * row[-1]
        end = min(int(np.searchsorted(row, limit, side="right")) - 1, int(chain.memory_reach[device, position]))
        if end > position:
            spans.append((device, position, end))
            position = end
        if position == chain.units:
            return spans
    return None


def shortage(chain: Chain, order: Sequence[int] | None, feasible: object) -> Infeasible:
    """The error for a problem without a plan. `feasible(extra)`: True if `extra` more bytes on every device suffice."""
    problem = chain.problem
    sizes = np.diff(chain.bytes)
    largest = int(sizes.argmax())

    if sizes[largest] > chain.limit.max():
        device = int(chain.limit.argmax())
        return Infeasible(
            f"{problem.name_of(largest)} needs {format_bytes(sizes[largest])}, but the largest memory, of device "
            f"{problem.id_of(device)}, is {format_bytes(chain.limit[device])}: "
            f"short by {format_bytes(sizes[largest] - chain.limit[device])}; "
            "use a device with more memory, or smaller micro-batches"
        )
    needed, offered = float(chain.bytes[-1]), float(chain.limit.sum())
    if needed > offered:
        return Infeasible(
            f"the units need {format_bytes(needed)} in all, but {chain.devices} devices offer {format_bytes(offered)}: "
            f"short by {format_bytes(needed - offered)}; add devices or memory, or take smaller micro-batches"
        )
    low, high = 0.0, float(sizes.max() + needed / chain.devices)
    assert callable(feasible)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if feasible(middle) else (middle, high)
    position, text = 0, ""
    for device in order or range(chain.devices):
        end = int(chain.memory_reach[device, position])
        position = max(position, end)
    lost = chain.units - position
    if lost > 0:
        order_used = "in the given order the devices" if order is not None else "in their own order the devices"
        text = (
            f"; {order_used} hold {position} of {chain.units} units, "
            f"and {format_bytes(chain.bytes[-1] - chain.bytes[position])} stay over"
        )
    return Infeasible(
        f"the units need {format_bytes(needed)} of the {format_bytes(offered)} offered, but no split into whole units "
        f"fits: every device is "
        f"short by {format_bytes(high)}{text}; add devices or memory, or take smaller micro-batches"
    )
