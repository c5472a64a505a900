"""Every benchmark starts as its own first lines say, from any directory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "tests" / "bench"
SCRIPT = re.compile(r"^    python tests/bench/(\w+)\.py", re.MULTILINE)
STARTED = """
import contextlib, io, json, runpy, sys
found, path = {}, list(sys.path)
for file in sys.argv[1:]:
    # As a fresh Python has it: the script's own directory first, and no package of this repository imported yet.
    sys.path[:] = [file.rpartition("/")[0], *path]
    for name in [one for one in sys.modules if one.partition(".")[0] in ("tests", "coordinator", "facility")]:
        del sys.modules[name]
    sys.argv, said, code = [file, "--help"], io.StringIO(), None
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        code = repr(error)
    found[file] = [code, "usage:" in said.getvalue()]
print(json.dumps(found))
"""


def scripts() -> list[Path]:
    """Those that say how they are started as a file."""
    return [file for file in sorted(BENCH.glob("*.py")) if file.stem in SCRIPT.findall(file.read_text())]


def test_benchmarks_that_are_started_as_files_are_known():
    assert {"federated_quality", "federated_quality_choose", "federated_quality_report"} <= {f.stem for f in scripts()}


@pytest.mark.slow
def test_every_benchmark_shows_its_help_from_any_directory(tmp_path: Path):
    """In one process, since importing torch is most of a start."""
    command = [sys.executable, "-c", STARTED, *map(str, scripts())]
    user = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # tests' has this repository
    told = subprocess.run(command, cwd=tmp_path, env=user, capture_output=True, text=True, check=True)
    found = json.loads(told.stdout.splitlines()[-1])
    assert {file: what for file, what in found.items() if what != [0, True]} == {}
    assert len(found) == len(scripts())
