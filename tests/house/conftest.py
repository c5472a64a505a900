"""The demo, made once for README and documentation."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT


@dataclass(frozen=True)
class Demo:
    """A clean clone in which `make demo` has run, in the environment that `make env` made."""

    clone: Path
    variables: dict[str, str]
    """Of the environment for further commands."""
    output: str
    """What `make demo` wrote."""

    def run(self, script: str) -> str:
        """What a script writes, which must end with 0."""
        return shell(script, self.clone, self.variables)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    environment = Path(sys.prefix)
    if not (environment / ".ready").exists():
        pytest.skip("this environment was not made by `make env`, so `make demo` would make another")
    home = tmp_path_factory.mktemp("demo")
    clone = home / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    (environment / ".ready").touch()  # newer than the clone's files
    variables = {"PYTHONPATH": str(clone), "HOME": str(home), "VENV": str(environment)}
    return Demo(clone, variables, shell("make demo", clone, variables))


def shell(script: str, folder: Path, variables: dict[str, str]) -> str:
    """What a script of bash writes in a folder, with the programs of this environment; it must end with 0."""
    path = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=os.environ | {"PATH": path} | variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}"
    return done.stdout
