"""Law: after the stated time no test begins, and each that does not is listed with the reason."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT


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
