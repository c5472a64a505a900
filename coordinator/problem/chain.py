"""The part of a planning problem that assigns layers to devices, without a network."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.problem.problem import Matrix, Problem
from coordinator.problem.required import require


@dataclass(frozen=True, kw_only=True)
class ChainProblem:
    """Layers to devices only: contiguous spans, memory limits, no network (Sky Computing's problem)."""

    seconds: Matrix
    """[device][unit], in the problem's own unit of time."""
    unit_bytes: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    """By device; infinite: not limited."""
    unit_names: tuple[str, ...] = ()
    device_ids: tuple[str, ...] = ()
    time_unit: str = "seconds"

    def __post_init__(self) -> None:
        devices, units = len(self.seconds), len(self.unit_bytes)
        require(devices > 0 and units > 0, "the problem has no devices or no units")
        require(
            all(len(row) == units for row in self.seconds) and len(self.memory_bytes) == devices,
            f"seconds must be {devices} x {units} and memory {devices} long",
        )
        array = np.array(self.seconds)
        require(bool(np.isfinite(array).all() and (array >= 0).all()), "seconds holds a negative or non-finite number")
        sizes = np.array(self.unit_bytes)
        require(bool(np.isfinite(sizes).all() and (sizes >= 0).all()), "a unit's memory is negative or not finite")
        for device, value in enumerate(self.memory_bytes):
            require(value > 0, f"memory of device {self.id_of(device)} is {value}, expected more than 0")

    def id_of(self, device: int) -> str:
        return repr(self.device_ids[device]) if self.device_ids else str(device)

    def name_of(self, unit: int) -> str:
        return f"unit {unit}" + (f" ({self.unit_names[unit]})" if self.unit_names else "")


def chain_of(problem: Problem) -> ChainProblem:
    """The layers-to-devices part of a problem: forward plus backward of one micro-batch, one replica, no network."""
    samples = min(problem.whole_sizes)
    seconds = problem.forward_seconds(samples) + problem.backward_seconds(samples)
    return ChainProblem(
        seconds=tuple(map(tuple, seconds.tolist())),
        unit_bytes=tuple((problem.per_unit("state_bytes") + samples * problem.per_unit("stored_bytes")).tolist()),
        memory_bytes=tuple(problem.memory.tolist()),
        unit_names=tuple(unit.kind for unit in problem.units),
        device_ids=tuple(device.id for device in problem.devices),
    )
