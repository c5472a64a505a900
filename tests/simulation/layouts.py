"""Layouts that the tests simulate."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from coordinator.simulation.pipelines.layout import Layout


def uniform(
    stages: int,
    micro_batches: int,
    *,
    replicas: int = 1,
    virtual_stages: int = 1,
    schedule: str = "gpipe",
    forward: float = 1.0,
    backward: float = 2.0,
    cut_bytes: float = 0.0,
    gradient_bytes: float = 0.0,
    latency: float = 0.0,
    bandwidth: float = 1.0,
    **changes: Any,
) -> Layout:
    """Equal devices and links; `forward` and `backward` are seconds of a whole row (all its chunks together)."""
    chunks, devices = stages * virtual_stages, stages * replicas
    values: dict[str, Any] = {
        "grid": tuple(tuple(range(s * replicas, (s + 1) * replicas)) for s in range(stages)),
        "virtual_stages": virtual_stages,
        "schedule": schedule,
        "micro_batches": (micro_batches,) * replicas,
        "forward_seconds": np.full((chunks, replicas), forward / virtual_stages),
        "backward_seconds": np.full((chunks, replicas), backward / virtual_stages),
        "cut_bytes": np.full(chunks - 1, cut_bytes),
        "gradient_bytes": np.full(chunks, gradient_bytes),
        "latency": np.full((devices, devices), latency),
        "bandwidth": np.full((devices, devices), bandwidth),
    }
    return Layout(**{**values, **changes})


def random_layout(rng: np.random.Generator, stages: int, micro_batches: tuple[int, ...], **changes: Any) -> Layout:
    """Everything different: devices, cuts, links in both directions."""
    replicas = len(micro_batches)
    virtual = changes.get("virtual_stages", 1)
    chunks, devices = stages * virtual, stages * replicas
    drawn = {
        "forward_seconds": rng.uniform(0.5, 1.5, (chunks, replicas)),
        "backward_seconds": rng.uniform(1, 3, (chunks, replicas)),
        "cut_bytes": rng.uniform(0.1, 1, chunks - 1),
        "gradient_bytes": rng.uniform(0.1, 3, chunks),
        "latency": rng.uniform(0, 0.1, (devices, devices)),
        "bandwidth": rng.uniform(0.3, 3, (devices, devices)),
        "buckets": (3,) * chunks,
        "micro_batches": micro_batches,
    }
    plain = uniform(stages, 1, replicas=replicas, virtual_stages=virtual)
    return dataclasses.replace(plain, **{**drawn, **changes})
