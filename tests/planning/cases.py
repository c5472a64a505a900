"""Problems the planner's tests share: small random ones, and the published cases where they are present."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.planning.problem import Problem
from coordinator.planning.read import problem_from_json

PUBLISHED = Path(__file__).resolve().parent.parent.parent.parent / "shared" / "facts" / "planning"
"""Cases published with arXiv 2206.01288 (github.com/DS3Lab/DT-FM) and arXiv 2202.11836 (hpcaitech/SkyComputing)."""

BEST_KNOWN = {
    "datacenter": 3.4398,
    "spot": 31.6342,
    "universities": 16.0868,
    "regional": 34.8020,
    "worldwide": 49.2184,
}


def published(name: str) -> Path:
    """The file of a published case; skips the test where it is absent."""
    path = PUBLISHED / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"{path} is absent: it holds the published case {name}")
    return path


def whole(devices: int = 4, blocks: int = 6, seed: int = 0, **change: Any) -> dict[str, Any]:
    """A small problem as JSON: unlike devices on two sites, random links."""
    rng = np.random.default_rng(seed)
    site = np.arange(devices) * 2 // devices
    near = site[:, None] == site[None, :]
    latency = np.where(near, 0.1, 10.0) * rng.uniform(0.8, 1.2, (devices, devices))
    bandwidth = np.where(near, 10.0, 1.0) * rng.uniform(0.8, 1.2, (devices, devices))
    return {
        "format": 1,
        "devices": [
            {
                "id": f"d{n}",
                "site": "ab"[site[n]],
                "memory_gigabytes": 8,
                "slowdown": float(rng.choice([1.0, 2.0, 4.0])),
            }
            for n in range(devices)
        ],
        "links": {"latency_ms": latency.tolist(), "bandwidth_gbit_per_s": bandwidth.tolist()},
        "units": [
            {
                "kind": "embedding",
                "parameter_megabytes": 20,
                "activation_megabytes": 2,
                "forward_ms": 1,
                "backward_ms": 1,
            },
            {
                "kind": "block",
                "count": blocks,
                "parameter_megabytes": 50,
                "state_megabytes": 200,
                "activation_megabytes": 2,
                "stored_megabytes": 20,
                "forward_ms": 10,
                "backward_ms": 20,
            },
            {"kind": "head", "parameter_megabytes": 20, "activation_megabytes": 0, "forward_ms": 4, "backward_ms": 8},
        ],
        "batch_samples": 16,
        "micro_batch_samples": [1],
        **change,
    }


def problem(**arguments: Any) -> Problem:
    """`whole` as a problem."""
    made = problem_from_json(whole(**arguments))
    assert isinstance(made, Problem)
    return made
