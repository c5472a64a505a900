"""The benchmark for GPUs, rehearsed on a CPU with tiny sizes: every part ends with figures and none with a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.gpu import LAWS
from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def rehearsed(place: Path, part: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests/bench/gpu.py"), "--tiny", "--parts", part, "--out", str(place / "out")]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=place, env=hidden, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads((place / "out").read_text())
    assert told["device"] == "cpu" and "failed" not in told[part], told[part].get("failed")
    return told[part]


def test_speed_beside_both_others(tmp_path: Path):
    found = rehearsed(tmp_path, "speed")
    assert not found["failures"] and not any("failed" in one for one in found["tried"])
    assert {name: len(rates) for name, rates in found["tokens_per_second"].items()} == {
        "crossfed": 1,
        "trainer": 1,
        "fsdp2": 1,
    }
    assert all(rate > 0 for rates in found["tokens_per_second"].values() for rate in rates)
    assert found["peak_memory_bytes"]["predicted_by_check"] > 0


def test_a_federation_of_two(tmp_path: Path):
    found = rehearsed(tmp_path, "federation")
    assert found["ended"] == "done"
    assert len(found["perplexity"]) == 2 and all(value > 1 for value in found["perplexity"])
    assert len(found["usage"]) == 2 and all(one["node_seconds"] > 0 for one in found["usage"])
    assert [one["facility"] for one in found["energy"]] == ["manual", "stdlib"]  # no counter need answer on a CPU


@pytest.mark.nightly
def test_every_law(tmp_path: Path):
    found = rehearsed(tmp_path, "laws")
    broken = {law.name: found[law.name] for law in LAWS if not found[law.name].get("holds")}
    assert not broken, broken
