"""facility/requirements.lock is of the pinned versions, whole, and what pip is held to."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from coordinator.bundle import copy_code
from tests.house.lock import LOCK, MACHINES, OF_TORCH, PYTHONS, ROOT, distributions, lines, normal
from tests.rounds.test_setup import tiny_wheel

LINE = re.compile(r"([a-z0-9-]+)==(\S+)((?: --hash=sha256:[0-9a-f]{64})+)")


def test_the_lock_holds_every_dependency_but_torch_in_the_version_of_the_constraints():
    head, place, *listed = LOCK.read_text().splitlines()
    assert place == "# for: " + " ".join(f"{python}-{machine}" for machine in MACHINES for python in PYTHONS), head
    locked = {found[1]: found[2] for line in listed if (found := LINE.fullmatch(line))}
    assert len(locked) == len(listed) and list(locked) == sorted(locked)
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = {normal(name): version for name, version in pinned.items()}
    assert {name: pinned.get(name, version) for name, version in locked.items()} == locked
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert distributions(wanted) - set(locked) == {"torch"} and not any(OF_TORCH.fullmatch(name) for name in locked)


def entry(name: str, version: str, digest: str) -> dict:
    told = {"archive_info": {"hashes": {"sha256": digest}}}
    return {"metadata": {"name": name, "version": version}, "download_info": told}


def test_a_line_has_the_digests_of_every_python_and_one_version():
    reports = [{"install": [entry("A_b", "1", "c" * 64), entry("nvidia-x", "1", "d" * 64)]}]
    reports.append({"install": [entry("a-b", "1", "a" * 64)]})
    assert lines(reports) == [f"a-b==1 --hash=sha256:{'a' * 64} --hash=sha256:{'c' * 64}"]
    with pytest.raises(ValueError, match="a-b is 1 and 2"):
        lines([*reports, {"install": [entry("a.b", "2", "e" * 64)]}])


@pytest.mark.slow
@pytest.mark.parametrize("altered", [False, True])
def test_setup_installs_nothing_that_has_another_digest(tmp_path: Path, altered: bool):
    """The index has a wheel of the locked version, with other bytes or not."""
    index, home = tmp_path / "index", tmp_path / "home"
    index.mkdir()
    wheel = tiny_wheel(index)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    copy_code(tmp_path / "crossfed")
    lock = tmp_path / "crossfed/facility/requirements.lock"
    head = lock.read_text().splitlines()[:2]
    lock.write_text("\n".join([*head, f"tiny-thing==1.2 --hash=sha256:{digest}"]) + "\n")
    if altered:
        wheel.write_bytes(wheel.read_bytes() + b"\0")
    options = ["--home", home, "--python", sys.executable, "--torch", "cuda", "--no-self-check"]
    told = subprocess.run(
        ["bash", tmp_path / "crossfed/facility/setup.sh", *options],
        capture_output=True,
        text=True,
        env=os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)},
    )
    assert "packages: by the digests in" in told.stdout and "torch has none there" in told.stdout, told.stderr
    assert ("DO NOT MATCH THE HASHES" in told.stderr) == altered, told.stderr
    assert bool(list((home / "venv").rglob("tiny_thing.py"))) != altered
    assert f"using those of {sys.executable}" in told.stdout, "torch is not in this index either way"
