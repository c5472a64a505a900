"""The engine's own steps work in a folder of the run, which its process removes and no fork of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from facility.exchange.files.durable import scratch_directory

PROGRAM = """
import os
from streamflow.core.deployment import LocalTarget
from coordinator.streamflow_plugin import engine_folder

engine_folder.install()
engine_folder.install()
first, second, own = LocalTarget().workdir, LocalTarget().workdir, LocalTarget(workdir="/x").workdir
assert first == second and own == "/x", (first, second, own)
if os.fork() == 0:
    raise SystemExit(0)
assert os.wait()[1] == 0
print(first, oct(os.stat(first).st_mode & 0o777), flush=True)
if os.environ.get("KILLED"):
    os.kill(os.getpid(), 9)
"""


def run(temporary: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TMPDIR": str(temporary)} | more
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)


def test_a_run_has_one_folder_of_its_own_and_removes_it(tmp_path: Path):
    told = run(tmp_path)
    folder, mode = told.stdout.split()
    assert Path(folder).parent == tmp_path and mode == "0o700"
    assert not os.listdir(tmp_path), told.stderr


def test_what_a_killed_run_left_goes_with_the_next_and_a_living_ones_stays(tmp_path: Path):
    """Each kill left a folder in the system's temporary folder for ever."""
    (left,) = run(tmp_path, KILLED="1").stdout.split()[:1]
    assert os.listdir(tmp_path) == [Path(left).name]
    with scratch_directory(tmp_path / "crossfed-engine") as living:
        assert run(tmp_path).returncode == 0
        assert os.listdir(tmp_path) == [living.name]
