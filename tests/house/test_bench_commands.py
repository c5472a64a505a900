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
for line in sys.argv[1:]:
    file, *arguments = line.split(" ")
    # As a fresh Python has it: the script's own directory first, and no package of this repository imported yet.
    sys.path[:] = [file.rpartition("/")[0], *path]
    for name in [one for one in sys.modules if one.partition(".")[0] in ("tests", "coordinator", "facility")]:
        del sys.modules[name]
    sys.argv, said, code = [file, *(arguments or ["--help"])], io.StringIO(), None
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        code = repr(error)
    found[line] = [code, "usage:" in said.getvalue(), said.getvalue().splitlines()[-1:]]
print(json.dumps(found))
"""


def scripts() -> list[Path]:
    """Those that say how they are started as a file."""
    return [file for file in sorted(BENCH.glob("*.py")) if file.stem in SCRIPT.findall(file.read_text())]


def test_benchmarks_that_are_started_as_files_are_known():
    assert {"federated_quality", "federated_quality_choose", "federated_quality_report"} <= {f.stem for f in scripts()}


def modules() -> list[Path]:
    """Those that are started by `python -m`, from this repository alone."""
    return [file for file in sorted(BENCH.glob("*.py")) if '"__main__"' in file.read_text() and file not in scripts()]


def outcomes(lines: list[str], folder: Path, **environment: str) -> dict[str, list]:
    """By line, a script and its arguments: exit code, whether it showed its usage, and the last line of what it said.

    All in one process, since importing torch is most of a start.
    """
    user = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # tests' has this repository
    user |= environment
    command = [sys.executable, "-c", STARTED, *lines]
    told = subprocess.run(command, cwd=folder, env=user, capture_output=True, text=True, check=True)
    return json.loads(told.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_benchmark_shows_its_help_from_any_directory(tmp_path: Path):
    found = outcomes([str(file) for file in scripts()], tmp_path)
    assert {file: what for file, what in found.items() if what[:2] != [0, True]} == {}
    assert len(found) == len(scripts())


@pytest.mark.slow
def test_what_other_benchmarks_start_shows_its_help_too(tmp_path: Path):
    """As `slow_rank`, which read its environment when it was imported and ended in a KeyError."""
    assert {"slow_rank", "lean_trainer"} <= {file.stem for file in modules()}
    found = outcomes([str(file) for file in modules()], tmp_path, PYTHONPATH=str(ROOT))
    assert {file: what for file, what in found.items() if what[:2] != [0, True]} == {}


@pytest.mark.slow
def test_what_a_benchmark_cannot_measure_is_refused_in_one_line(tmp_path: Path):
    """As `--kinds` of none: other kinds were measured for minutes before it failed, or the JSON held nothing of it."""
    lines = {
        "train_speed --kinds ddp,none": "argument --kinds: found 'none', expected of fsdp2, ddp, single, documents",
        "train_speed --steps 2": "argument --steps: found '2', expected a whole number of 3 or more",
        "train_speed --ranks 1": "argument --ranks: found 1, expected 2 or more for ddp and fsdp2, or --kinds single",
        "train_head --steps 2": "argument --steps: found '2', expected a whole number of 3 or more",
        "train_memory --ranks 1,two": "argument --ranks: found 'two', expected of 1, 2, 3",
        "sync_quality --policies none": "argument --policies: invalid choice: 'none' (choose from",
        "sync_speed --steps 0": "argument --steps: found '0', expected a whole number of 1 or more",
        "rehearsals --tiny --parts 9": "argument --parts: found '9', expected of 0, 1, 2, 3, by commas",
        "predictions --cases small,none": "argument --cases: found 'none', expected of small",
        "chat_texts --data /none --out /none/out": "argument --data: found no conversations in /none/english",
    }
    found = outcomes([f"{BENCH}/{line.replace(' ', '.py ', 1)}" for line in lines], tmp_path)
    for (code, _, last), (line, message) in zip(found.values(), lines.items(), strict=True):
        assert (code, message in "".join(last)) == (2, True), (line, last)


@pytest.mark.slow
def test_a_rehearsal_for_which_no_time_is_left_is_left_out(tmp_path: Path):
    command = [sys.executable, BENCH / "rehearsals.py", "--tiny", "--minutes", "0", "--work", tmp_path]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = json.loads(told.stdout)["rehearsals"]
    assert {name: one["left_out"] for name, one in found.items()} == dict.fromkeys(
        ("full-1.1b", "lora-1.1b", "lora-8b", "perturb-3b"), "0 s were left, it takes 5 or more"
    )
