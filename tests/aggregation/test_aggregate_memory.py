"""Peak memory of the aggregation step grows with neither the model nor the number of updates."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregation.state import belong_to
from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.delta import encode_update
from facility.exchange.checkpoints.writer import Planned, TensorWriter
from facility.exchange.files.durable import write_json
from facility.exchange.messages.manifest import NAME, Manifest, read_manifest, write_manifest

LAUNCH = """
import os, sys
child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(child, 0)
print(usage.ru_maxrss, file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""A process's peak begins with the memory of the one that started it, so a small one starts it."""


MOST_MEGABYTES = 13.0
"""Of an aggregation with up to 16 updates and the state of its server optimizer, in addition to Python, numpy and
pydantic: 47 to 48 MB with the pinned versions on two cores. Together the target is 60."""
MOST_MASKED = 7.0
"""Of an aggregation of masked updates, which keeps no state, in addition to these and to what draws masks (6 MB)."""

AS_A_ROUND = """
import sys
from pathlib import Path
from coordinator.aggregate import read_settings
from coordinator.aggregation.request import Request
from coordinator.aggregation.run import aggregate
root, state, verified, *updates = sys.argv[1:]
aggregate(Request(base=Path(root, "base"), updates={Path(one).name: Path(one) for one in updates},
    out=Path(root, "next"), state_in=Path(state) if state else None, state_out=Path(root, "state-out"),
    settings=read_settings(Path(root, "settings.json")), verify_base=True, verify_updates=verified == "1"))
"""
"""What the commit step of a round calls."""

MASKED = """
import sys
from pathlib import Path
from coordinator.aggregation.request import Request
from coordinator.aggregation.run import aggregate
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.unmasking import Unmasking
root, *updates = sys.argv[1:]
names = [Path(one).name for one in updates]
unmasking = Unmasking(bits=16, weights={name: 1 / len(names) for name in names}, survivors=names,
    seeds=[(-1, bytes([number + 1] * 32)) for number in range(len(names))], clips={}, default_clip=1.0)
aggregate(Request(base=Path(root, "base"), updates={Path(one).name: Path(one) for one in updates},
    out=Path(root, "next"), settings=AggregationSettings(rule="mean"), unmasking=unmasking))
"""
"""The aggregation of masked updates, with a seed for each."""


def save(directory: Path, tensors: int, dtype: str = "BF16", value: int = 0x3F80) -> Path:
    """A checkpoint of tensors of 4 million values. `dtype`: BF16, F32, or U16 for masked ones; `value`: of 16 bits."""
    directory.mkdir(parents=True)
    one = np.ones(1 << 22, np.float32) if dtype == "F32" else np.full(1 << 22, value, np.uint16)
    content = one.data.cast("B")
    planned = [Planned(name=f"w{i}", dtype=dtype, shape=(1 << 22,)) for i in range(tensors)]
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
    return peak_of([*command, "--settings", str(root / "settings.json")])


def peak_of(command: list[str]) -> float:
    """Peak resident megabytes of a command that ends well."""
    done = subprocess.run([sys.executable, "-S", "-c", LAUNCH, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split()[-1]) / 1024


def megabytes_of_imports(*more: str) -> float:
    """Of Python and all that an aggregation imports; `more`: modules that this one needs besides."""
    return peak_of([sys.executable, "-c", f"import {', '.join(['coordinator.aggregate', *more])}"])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
def test_memory_is_bounded(tmp_path: Path):
    small, large = save(tmp_path / "small", 4), save(tmp_path / "large", 12)  # 34 and 101 MB
    two, eight = (peak_megabytes(tmp_path / f"of{n}", small, n) for n in (2, 8))
    longer = peak_megabytes(tmp_path / "longer", large, 2)
    assert max(two, eight, longer) < 450
    assert eight - two < 20 and longer - two < 20, (two, eight, longer)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
@pytest.mark.parametrize(
    ("count", "verified"),
    [
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(6, True, marks=pytest.mark.slow),
        (16, True),
        pytest.param(16, False, marks=pytest.mark.slow),
    ],
)
def test_the_state_of_the_server_optimizer_fits_the_same_bound(tmp_path: Path, count: int, verified: bool):
    base = save(tmp_path / "base", 6)  # 50 MB: more than may wait in memory, in every file that is hashed
    sent = write_manifest(base, Manifest(kind="model", federation="test", round=0))
    updates = [linked_update(base, sent, tmp_path / f"site{number:02d}") for number in range(count)]
    write_json(tmp_path / "settings.json", {"weights": "equal", "rule": "nesterov"})

    def peak(state: str, updates: list[Path]) -> float:
        words = [str(tmp_path), state, str(int(verified)), *map(str, updates)]
        return peak_of([sys.executable, "-c", AS_A_ROUND, *words])

    peak("", updates[:1])
    (tmp_path / "state-out").rename(tmp_path / "state")
    shutil.rmtree(tmp_path / "next")
    old = read_manifest(tmp_path / "state")
    write_manifest(tmp_path / "state", dataclasses.replace(old, round=0, files={}))
    belong_to(tmp_path / "state", sent)
    imports = megabytes_of_imports()
    found = []
    for _ in range(
        3
    ):  # a thread that is held up by other work makes the other's output wait in memory, to be hashed in turn
        for out in ("next", "state-out"):
            shutil.rmtree(tmp_path / out, ignore_errors=True)
        found.append(peak(str(tmp_path / "state"), updates))
        if found[-1] - imports <= MOST_MEGABYTES:
            break
    assert min(found) - imports <= MOST_MEGABYTES, (found, imports)


def linked_update(base: Path, sent: Manifest, directory: Path) -> Path:
    """An update that holds what `base` holds."""
    directory.mkdir()
    for name in ("model.safetensors", "config.json"):
        os.link(base / name, directory / name)
    described = Manifest(
        kind="update", federation="test", round=0, facility=directory.name, base_sha256=sent.content_sha256
    )
    write_manifest(directory, described)
    return directory


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 16])
def test_masked_updates_fit_a_bound_too(tmp_path: Path, count: int):
    save(tmp_path / "base", 6)
    masked = save(tmp_path / "masked", 6, dtype="U16")
    updates = [tmp_path / f"site{number:02d}" for number in range(count)]
    for update in updates:
        update.mkdir()
        for name in ("model.safetensors", "config.json"):
            os.link(masked / name, update / name)
    imports = megabytes_of_imports("cryptography.hazmat.primitives.ciphers")
    found = peak_of([sys.executable, "-c", MASKED, str(tmp_path), *map(str, updates)])
    assert found - imports <= MOST_MASKED, (found, imports)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
@pytest.mark.skipif(native.library() is None, reason="no C compiler here")
@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["delta-int8", "delta-int4", "sparse", "sparseloco"])
@pytest.mark.parametrize("count", [4, 16])
def test_messages_as_they_are_stored_fit_the_same_bound(tmp_path: Path, count: int, encoding: str):
    base, full = save(tmp_path / "base", 6), save(tmp_path / "full", 6, value=0x3F81)
    write_manifest(base, Manifest(kind="model", federation="test", round=0))
    described = Manifest(kind="update", federation="test", round=0, facility="site00")
    write_manifest(full, described)
    encode_update(full=full, reference=base, out=tmp_path / "site00", encoding=encoding, norms=True)
    updates = [tmp_path / f"site{number:02d}" for number in range(count)]
    for update in updates[1:]:
        shutil.copytree(updates[0], update, copy_function=os.link)
        (update / NAME).unlink()
        told = dataclasses.replace(read_manifest(updates[0]), facility=update.name)
        write_manifest(update, told)
    write_json(tmp_path / "settings.json", {"weights": "equal", "rule": "mean"})
    imports = megabytes_of_imports()
    command = [sys.executable, "-m", "coordinator.aggregate", "--base", str(base), "--out", str(tmp_path / "out")]
    command += [word for update in updates for word in ("--update", str(update))]
    found = peak_of([*command, "--settings", str(tmp_path / "settings.json")])
    assert found - imports <= MOST_MEGABYTES, (found, imports)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
def test_many_updates_in_float32_fit_the_same_bound(tmp_path: Path):
    base = save(tmp_path / "base", 6, dtype="F32")
    imports = megabytes_of_imports()
    found = peak_megabytes(tmp_path / "of16", base, 16)
    assert found - imports <= MOST_MEGABYTES, (found, imports)
