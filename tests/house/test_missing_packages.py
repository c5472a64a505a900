"""Commands of `crossfed` in an environment that holds what a facility needs, and not the coordinator's packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

TYPED = """
import sys
sys.modules[sys.argv[1]] = None  # as if it were not installed
sys.argv = ["crossfed", *sys.argv[2:]]
from coordinator.cli import main
main()
"""


@pytest.mark.parametrize(
    ("package", "words"), [("ruamel", ["schema"]), ("ruamel.yaml", ["schema"]), ("ruamel", ["demo"])]
)
def test_a_package_that_is_not_installed_is_named_with_what_installs_it(package: str, words: list[str], tmp_path):
    done = subprocess.run([sys.executable, "-c", TYPED, package, *words], capture_output=True, text=True, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "") and "no package 'ruamel'" in line, line
    assert "crossfed[coordinator]" in line and "coordinator/setup.sh" in line
    assert not any(tmp_path.iterdir())


def test_a_module_of_crossfed_that_is_missing_is_a_fault_of_it(tmp_path):
    typed = [sys.executable, "-c", TYPED, "coordinator.config.schema", "schema"]
    done = subprocess.run(typed, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" in done.stderr
