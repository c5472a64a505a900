"""Laws: after the stated time no test begins, and each that does not is listed with the reason; by turns each file is
the first to begin and the last."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT, by_turns


@pytest.mark.slow
@pytest.mark.parametrize("limit, outcome", [("1", "skipped"), ("99999999999", "passed")])
def test_no_test_begins_after_the_stated_time(limit: str, outcome: str):
    variables = os.environ | {"CROSSFED_BEGIN_BY": limit}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/exchange/test_changed.py"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    last = done.stdout.strip().splitlines()[-1]
    assert outcome in last and not {"passed", "skipped", "failed"} - {outcome} & set(last.split()), last
    assert ("the time of this run was over" in done.stdout) == (outcome == "skipped")


def test_by_turns_every_file_comes_first_and_last():
    files = [ROOT / "tests" / name for name in ("a/test_one.py", "a/test_two.py", "b/test_one.py", "b/test_two.py")]
    orders = [sorted(files, key=lambda file: by_turns(file, f"2026-11-{day:02}")) for day in range(1, 31)]
    assert {order[0] for order in orders} == {order[-1] for order in orders} == set(files)


@pytest.mark.slow
def test_the_turn_orders_what_pytest_collects():
    files = ["tests/exchange/test_changed.py", "tests/exchange/test_locks.py", "tests/exchange/test_groups.py"]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *files]
    variables = os.environ | {"CROSSFED_TURN": "2026-11-28"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    collected = dict.fromkeys(line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line)
    assert list(collected) == sorted(files, key=lambda file: by_turns(ROOT / file, "2026-11-28"))
