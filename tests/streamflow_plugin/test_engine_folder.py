"""The engine's own steps work in a folder of the run, which its process removes and no fork of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
print(first, oct(os.stat(first).st_mode & 0o777))
"""


def test_a_run_has_one_folder_of_its_own_and_removes_it(tmp_path: Path):
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    folder, mode = told.stdout.split()
    assert Path(folder).parent == tmp_path and mode == "0o700"
    assert not os.listdir(tmp_path), told.stderr
