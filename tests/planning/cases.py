"""Problems the planner's tests share: small random ones, and the published cases where they are present."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.problem.problem import Problem
from coordinator.problem.read import problem_from_json

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


def heterogeneous(name: str, seed: int = 0, *, schedules: tuple[str, ...] = ("gpipe",), **change: Any) -> Problem:
    """A published network with unequal devices: speeds 1, 1/2, 1/4 and room for 6, 4, 3 of 24 layers, at random.

    GPT3-XL as in arXiv 2206.01288: 24 layers, 0.65 GB of gradients a stage of three, about 8.3 MB of activations a
    sample, 61 micro-batches of one sample in each of 8 pipelines; a stage of three takes 13 ms forward and 40 ms
    backward on the fast device (assumed). The data centre's bandwidths are gigabytes per second in fact (its authors'
    text says 25 Gbit/s where the matrix has 3.125), so they are taken times 8.
    """
    import json

    raw = json.loads(published(name).read_text())
    rng = np.random.default_rng(seed)
    kind = rng.integers(3, size=len(raw["delay_ms"]))
    bandwidth = np.array(raw["bandwidth_gbit_per_s"]) * (8 if name in ("datacenter", "spot") else 1)
    layer = 0.65e9 * 8 / 24
    thin = {"parameter_bytes": 0, "state_bytes": 0, "forward_seconds": 0, "backward_seconds": 0}
    activation = 2024 * 2048 * 2
    made = problem_from_json(
        {
            "name": f"{name}, unequal devices, seed {seed}",
            "devices": [
                {"id": f"gpu{n}", "slowdown": [1.0, 2.0, 4.0][k], "memory_bytes": [6, 4, 3][k] * layer * 1.001}
                for n, k in enumerate(kind)
            ],
            "links": {"latency_ms": raw["delay_ms"], "bandwidth_gbit_per_s": bandwidth.tolist()},
            "units": [
                {"kind": "embedding", "activation_bytes": activation, **thin},
                {
                    "kind": "block",
                    "count": 24,
                    "parameter_bytes": layer,
                    "state_bytes": layer,
                    "activation_bytes": activation,
                    "forward_ms": 13 / 3,
                    "backward_ms": 40 / 3,
                },
                {"kind": "head", "activation_bytes": 0, **thin},
            ],
            "batch_samples": 488,
            "schedules": list(schedules),
            "syncs": ["sharded_ps"],
            **change,
        }
    )
    assert isinstance(made, Problem)
    return made
