"""The part of a planning problem that places a grid of equal stages on a network."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.problem.problem import Device, Links, Matrix, Problem
from coordinator.problem.required import require, require_finite


@dataclass(frozen=True, kw_only=True)
class PlacementProblem:
    """A grid of equal stages on an unequal network only (DT-FM's problem, arXiv 2206.01288)."""

    latency_seconds: Matrix
    bandwidth_bytes_per_second: Matrix
    stages: int
    replicas: int
    gradient_bytes: float
    """Of one stage, as the published cost reads it."""
    activation_bytes: float
    """Across one boundary and iteration of one pipeline."""
    device_ids: tuple[str, ...] = ()
    best_known_cost: float | None = None

    def __post_init__(self) -> None:
        count = len(self.latency_seconds)
        require(self.stages >= 1 and self.replicas >= 1, "stages and replicas must be 1 or more")
        require(
            self.stages * self.replicas == count,
            f"{self.stages} stages x {self.replicas} replicas need {self.stages * self.replicas} devices, "
            f"found {count}",
        )
        require_finite(gradient_bytes=self.gradient_bytes, activation_bytes=self.activation_bytes)
        names = self.device_ids or tuple(str(i) for i in range(count))
        Links(latency_seconds=self.latency_seconds, bandwidth_bytes_per_second=self.bandwidth_bytes_per_second).check(
            tuple(Device(id=name) for name in names)
        )


def placement_of(problem: Problem, stages: int, replicas: int) -> PlacementProblem:
    """The network part of a whole problem: equal stages, whole-batch transfers, identical devices."""
    samples = problem.batch_samples / replicas
    cuts = problem.per_unit("activation_bytes")[:-1]
    return PlacementProblem(
        latency_seconds=problem.links.latency_seconds,
        bandwidth_bytes_per_second=problem.links.bandwidth_bytes_per_second,
        stages=stages,
        replicas=replicas,
        gradient_bytes=float(problem.per_unit("parameter_bytes").sum() / stages),
        activation_bytes=float(samples * np.median(cuts)) if len(cuts) else 0.0,
        device_ids=tuple(device.id for device in problem.devices),
    )
