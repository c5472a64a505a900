"""Peak memory of the aggregation step grows with neither the model nor the number of updates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from facility.exchange.checkpoints.writer import Planned, TensorWriter
from facility.exchange.files.durable import write_json

LAUNCH = """
import os, sys
child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(child, 0)
print(usage.ru_maxrss, file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""A process's peak begins with the memory of the one that started it, so a small one starts it."""


def save(directory: Path, tensors: int) -> Path:
    """A checkpoint of bfloat16 tensors of 8 MB."""
    directory.mkdir(parents=True)
    content = np.full(1 << 22, 0x3F80, np.uint16).data.cast("B")
    planned = [Planned(name=f"w{i}", dtype="BF16", shape=(1 << 22,)) for i in range(tensors)]
    with TensorWriter(directory, {"model.safetensors": planned}) as writer:
        for tensor in planned:
            writer.write(tensor.name, 0, content)
    write_json(directory / "config.json", {})
    return directory


def peak_megabytes(root: Path, base: Path, updates: int) -> float:
    """Of averaging `updates` hard-linked copies of `base`."""
    root.mkdir()
    command = [sys.executable, "-m", "coordinator.aggregate", "--base", str(base), "--out", str(root / "out")]
    for number in range(updates):
        copy = root / f"update{number}"
        copy.mkdir()
        os.link(base / "model.safetensors", copy / "model.safetensors")
        command += ["--update", str(copy)]
    (root / "settings.json").write_text(json.dumps({"weights": "equal"}))
    done = subprocess.run(
        [sys.executable, "-S", "-c", LAUNCH, *command, "--settings", str(root / "settings.json")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split()[-1]) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
def test_memory_is_bounded(tmp_path: Path):
    small, large = save(tmp_path / "small", 4), save(tmp_path / "large", 12)  # 34 and 101 MB
    two, eight = (peak_megabytes(tmp_path / f"of{n}", small, n) for n in (2, 8))
    longer = peak_megabytes(tmp_path / "longer", large, 2)
    assert max(two, eight, longer) < 450
    assert eight - two < 20 and longer - two < 20, (two, eight, longer)
