"""Every command of a module can be asked to say more, or less: `-v`, `--log-level`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.distributed import help_of

WITHOUT = {
    "facility/gate.py": "started by sshd, whose one line is a request",
    "facility/contract.py": "part of a trainer of one's own",
    "coordinator/conformance.py": "hands all it is given on to facility.conformance, which has them",
    "coordinator/config/reference.py": "reads the options of others for the documentation",
}
"""Files that make an `ArgumentParser`, but no command with options of its own, and why."""


def parsing() -> list[str]:
    """Files of both packages that make an `ArgumentParser`."""
    files = [file for folder in ("facility", "coordinator") for file in (ROOT / folder).rglob("*.py")]
    return sorted(str(file.relative_to(ROOT)) for file in files if "ArgumentParser(" in file.read_text())


def takes_log_options(text: str) -> bool:
    """Does a module add them itself, or with the options that it has in common with others?"""
    return any(call in text for call in ("add_log_options(", "login_command import add_arguments"))


def test_every_command_takes_the_options_of_logging():
    assert {file for file in parsing() if not takes_log_options((ROOT / file).read_text())} == WITHOUT.keys()


@pytest.mark.parametrize("module", ["facility.probe", "facility.unmask", "coordinator.steps.receive", "facility.audit"])
def test_the_help_names_them(module: str, tmp_path: Path):
    told = help_of(module, tmp_path)
    assert "--log-level" in told and "-v, --verbose" in told
