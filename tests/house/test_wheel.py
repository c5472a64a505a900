"""The wheel is self-contained: a federation runs from it without a checkout.

The environment is new; for speed it borrows the dependencies of the one that runs the tests. With
CROSSFED_WHEEL=install (`make wheel`) pip installs them from the index, as a user would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.federations import write_federation
from tests.house.tree import tracked

BUILD = "import sys, setuptools.build_meta as backend; print(backend.build_wheel(sys.argv[1]))"
INSTALL = os.environ.get("CROSSFED_WHEEL") == "install"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tracked files."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout: the wheel is compared with what git tracks")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked():
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_a_wheel_holds_every_file_of_the_checkout_that_runs(wheel: Path):
    held = {name: zipfile.ZipFile(wheel).read(name) for name in zipfile.ZipFile(wheel).namelist()}
    packages, beside = ("facility/", "coordinator/"), ("cwl/", "templates/")
    for name in tracked():
        if name.startswith(packages):
            assert held.get(name) == (ROOT / name).read_bytes(), name
        elif name.startswith(beside) or name in ("constraints.txt", "pyproject.toml", "workflow/federation.yml"):
            assert held.get(f"facility/_data/{name}") == (ROOT / name).read_bytes(), name
    assert not [name for name in held if name.startswith(("tests/", "docs/", "workflow/"))]


class Installed:
    """A new environment with the wheel in it, and nothing of the checkout on any path."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.bin, self.home = folder / "venv" / "bin", folder / "home"
        self.home.mkdir()
        venv.create(folder / "venv", with_pip=True)
        # -I: with the checkout on PYTHONPATH pip would find it, and install nothing.
        pip = [self.bin / "python", "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if INSTALL:
            pip.append("--no-compile")  # what is imported is compiled then
            subprocess.run([*pip, "-c", ROOT / "constraints.txt", f"{wheel}[coordinator]"], check=True, cwd=folder)
            return
        subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True, cwd=folder)
        site = next((folder / "venv" / "lib").glob("python*/site-packages"))
        borrowed = [path for path in sys.path if path.endswith("site-packages")]
        (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
        (program,) = entry_points(group="console_scripts", name="streamflow")
        load = f"from {program.module} import {program.attr}"
        script = f"#!{self.bin}/python\nimport sys\n{load}\nsys.exit({program.attr}())\n"
        (self.bin / "streamflow").write_text(script)
        (self.bin / "streamflow").chmod(0o755)

    def run(self, *words: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment; it must end with `code`."""
        environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.home),
            "HF_HUB_OFFLINE": "1",
            "RES_OPTIONS": "timeout:1 attempts:1",
        }
        program, *rest = map(str, words)
        done = subprocess.run(
            [str(self.bin / program), *rest], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(wheel, tmp_path_factory.mktemp("installed"))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1800 if INSTALL else 600)
def test_a_federation_of_two_facilities_runs_from_the_wheel(installed: Installed, tmp_path: Path):
    found = installed.run("python", "-c", "import coordinator.cli, facility; print(facility.__file__)", cwd=tmp_path)
    assert Path(found.stdout.strip()).is_relative_to(installed.bin.parent)
    write_federation(tmp_path / "federation", ["a", "b"], rounds=1, final_evaluation=False)
    here = tmp_path / "federation"
    installed.run("crossfed", "check", cwd=here)
    installed.run("crossfed", "run", "--quiet", cwd=here)
    told = json.loads(installed.run("crossfed", "status", "--json", cwd=here / "workflow").stdout)
    assert [entry["status"] for entry in told["rounds"][0]["facilities"]] == ["ok", "ok"]
    installed.run("crossfed", "report", "--out", tmp_path / "report.html", cwd=here)
    assert "<html" in (tmp_path / "report.html").read_text()


@pytest.mark.nightly
@pytest.mark.slow
def test_the_commands_of_a_new_user_work_in_any_folder(installed: Installed, tmp_path: Path):
    refused = installed.run("crossfed", "run", cwd=tmp_path, code=2)
    assert "crossfed init" in refused.stderr and not list(tmp_path.iterdir())
    installed.run("crossfed", "init", "mine", "--facility", "a=local", "--facility", "b=slurm", cwd=tmp_path)
    blank = installed.run("crossfed", "check", "--json", cwd=tmp_path / "mine", code=1)
    assert "angle brackets" in json.loads(blank.stdout)["rows"][0]["found"]
    installed.run("crossfed", "testbed", "--help", cwd=tmp_path)
    # The shell is found among the parents of the process: whoever runs this test may have another, or none.
    installed.run("/bin/bash", "-c", "crossfed --install-completion; exit $?", cwd=tmp_path)
    assert "crossfed" in (installed.home / ".bashrc").read_text()
    code = (
        "from pathlib import Path; from coordinator.bundle import make_bundle; "
        "make_bundle(Path('b'), python='3.11', platform='manylinux_2_28_x86_64', torch='cpu', run=lambda *_: 0)"
    )
    installed.run("python", "-c", code, cwd=tmp_path)
    for name in (
        "facility/setup.sh",
        "facility/meanwhile.sh",
        "pyproject.toml",
        "constraints.txt",
        "templates/leonardo.sh",
    ):
        assert (tmp_path / "b" / "crossfed" / name).is_file(), name
    assert not (tmp_path / "b" / "crossfed" / "facility" / "_data").exists()
