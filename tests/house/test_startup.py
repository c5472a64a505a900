"""Commands import what they need and no more: every job, workflow step and command line pays for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

HEAVY = ("torch", "transformers", "scipy", "streamflow", "datasets", "pandas", "plotly")
WITHOUT_NUMPY = ("the trainer", "the gate", "the command line")
STEPS = tuple(sorted(f"coordinator.steps.{file.stem}" for file in (ROOT / "coordinator/steps").glob("[!_]*.py")))
COMMANDS = {
    "the trainer": ("facility.train",),
    "the measurement": ("facility.measure",),
    "a facility's round": ("facility.round", "facility.launch"),
    "the gate": ("facility.gate", "facility.probe", "facility.audit"),
    "the command line": ("coordinator.cli",),
    "aggregation": ("coordinator.aggregate",),
    "the steps": STEPS,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_heavy_is_imported_before_it_is_needed(name: str):
    heavy = {*HEAVY, "numpy"} if name in WITHOUT_NUMPY else {*HEAVY}
    script = f"import sys, {', '.join(COMMANDS[name])}; print(*(set(sys.modules) & {heavy!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not done.stdout.split()


def test_what_a_gate_does_for_most_requests_begins_without_pydantic_and_numpy():
    """It starts once for every request; what trains or masks needs both."""
    modules = ("facility.gate", "facility.gating.transfers", "facility.gating.queue")
    script = f"import sys, {', '.join(modules)}; print(*(set(sys.modules) & {{'pydantic', 'numpy'}}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not done.stdout.split()
