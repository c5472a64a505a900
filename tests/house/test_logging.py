"""Jobs and steps log what they report on the way; only commands that answer a person print."""

from __future__ import annotations

import ast
import logging
import os
from pathlib import Path

import pytest

from facility.exchange import logs
from tests.conftest import ROOT
from tests.house.imports import nodes, together

pytestmark = together

ROOMS = (
    "coordinator/aggregation",
    "coordinator/archive",
    "coordinator/comparison",
    "coordinator/events",
    "coordinator/rounds",
    "coordinator/steps",
    "facility/launching",
    "facility/masking",
    "facility/rounds",
    "facility/sync",
    "facility/training",
)
ANSWERS = {
    "coordinator/steps/report.py": "the summary of a finished federation",
    "facility/sync/runtime/scheduler_process.py": "its address, to the process that started it",
    "facility/training/processes/ranks.py": "the last words of a rank that ends with an error",
}
"""Files of these rooms that print, and what."""


def prints(file: Path) -> bool:
    """Does a file call `print`?"""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        for node in nodes(file.read_text())
    )


@pytest.mark.parametrize("room", ROOMS)
def test_what_a_job_or_a_step_reports_is_logged(room: str):
    found = {str(file.relative_to(ROOT)) for file in (ROOT / room).rglob("*.py") if prints(file)}
    assert found == {name for name in ANSWERS if name.startswith(f"{room}/")}


@pytest.mark.parametrize("time", ["first", "second"])
def test_no_test_logs_as_a_command_of_an_earlier_one_was_told_to(time: str):
    """A test that counted warnings counted what another's `--verbose` let through."""
    ours = [logging.getLogger(name) for name in logs.OURS]
    assert [(one.level, one.handlers) for one in ours] == [(logging.NOTSET, [])] * 2 and logs.VARIABLE not in os.environ
    logs.configure_logging("info")
    assert all(one.level == logging.INFO and one.handlers for one in ours)
