"""Reference pages made from the code: settings, commands, registries. Called by `docs/conf.py` at every build."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMANDS = (
    "init",
    "quickstart",
    "check",
    "render",
    "run",
    "status",
    "report",
    "explain",
    "plan",
    "demo",
    "bundle",
    "rewind",
    "login",
    "testbed",
)
MODULES = (
    "coordinator.aggregate",
    "coordinator.plan",
    "coordinator.simulate",
    "coordinator.model",
    "facility.prepare",
    "facility.train",
    "facility.launch",
    "facility.round",
    "facility.measure",
    "facility.probe",
    "facility.selfcheck",
)


def generate(out: Path) -> None:
    """Write settings.md, commands.md and registries.md below `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "commands.md").write_text(commands())
    (out / "settings.md").write_text(settings())
    (out / "registries.md").write_text(registries())
