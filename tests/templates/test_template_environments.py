"""Modules, conda, virtual environments and images, entered by a rendered job under bash with stand-ins for them.

A job's own shell has no `module`: it comes from the profile that only login shells read, and pbsdsh's tasks get no
function of the shell that started them.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.templates.test_templates import ROOT, STAND_INS, filled, strictly

HOME_NAME = 'it\'s a "home"'
COMMAND = 'printf "%s|%s" "$ENTERED" "$PWD" > out; exit 7'
MODULE = """module() { [ "$1" = load ] || return 1; shift; export ENTERED="modules $*"; }
"""
CONDA = """conda() { [ "$1" = activate ] || return 1; export ENTERED="conda $2"; }
"""
RUNTIME = r"""#!/bin/bash
printf '%s\n' "$@" > "${0%/*}/../argv"
while [ "$1" != bash ]; do shift; done
ENTERED="$ENTERED, then image" exec "$@"
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """A PATH with a batch system's launchers, conda and a container runtime; `module` is a function of the site's
    profile, as on clusters."""
    programs, home = tmp_path / "bin", tmp_path / HOME_NAME
    programs.mkdir()
    (home / "crossfed").mkdir(parents=True)
    (home / "crossfed" / "env.sh").write_text("export ENTERED=home\n")
    (home / "venv" / "bin").mkdir(parents=True)
    (home / "venv" / "bin" / "activate").write_text("export ENTERED=venv\n")
    base = home / "conda"
    (base / "etc" / "profile.d").mkdir(parents=True)
    (base / "etc" / "profile.d" / "conda.sh").write_text(CONDA)
    texts = {name: f"#!/bin/bash\n{text}\n" for name, text in STAND_INS.items()} | {"apptainer": RUNTIME}
    texts["conda"] = (
        f'#!/bin/bash\n[ "$*" = "info --base" ] && echo "{str(base).replace(chr(34), chr(92) + chr(34))}"\n'
    )
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "module.sh").write_text(MODULE)
    (tmp_path / "nodes").write_text("node1\n")
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(home),
        "PROFILE": str(tmp_path / "module.sh"),
        "USER": "me",
        "RECORD": str(tmp_path / "argv"),
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "SLURM_CPUS_PER_TASK": "4",
        "SLURM_JOB_ID": "7",
    }


def run(machine: dict[str, str], folder: Path, template: str, **environment) -> str:
    """What the command saw: how it was entered."""
    text = strictly(filled(ROOT / "templates" / f"{template}.sh", **environment), COMMAND)
    text = re.sub(r"/etc/profile\b(?!\.d)", machine["PROFILE"], text)
    result = subprocess.run(["bash", "-c", text], cwd=folder, env=machine, capture_output=True, text=True, timeout=30)
    assert result.returncode == 7, result.stderr
    entered, place = (folder / "out").read_text().split("|")
    assert place == str(folder)
    return entered


@pytest.mark.parametrize("template", ["slurm", "leonardo", "pbs", "flux", "gridengine", "ssh"])
@pytest.mark.parametrize(
    ("environment", "entered"),
    [
        ({}, "home"),
        ({"modules": ["apptainer"], "image": "x.sif"}, "modules apptainer, then image"),
        ({"venv": "~/venv"}, "venv"),
        ({"conda": "fl env"}, "conda fl env"),
    ],
    ids=["home", "image", "venv", "conda"],
)
def test_the_command_runs_in_the_environment(machine, tmp_path: Path, template: str, environment: dict, entered: str):
    assert run(machine, tmp_path, template, **environment) == entered


@pytest.mark.parametrize("template", ["slurm", "leonardo", "pbs", "flux", "gridengine", "ssh"])
def test_a_bashrc_does_not_come_before_the_environment_where_a_login_starts_the_job(
    machine, tmp_path: Path, template: str
):
    """As below sshd, or in a queue to which the login's environment is handed on (`-V`): bash reads ~/.bashrc there."""
    home = Path(machine["HOME"])
    (home / ".bashrc").write_text('export ENTERED="$ENTERED, then bashrc"\n')
    login = machine | {"SSH_CLIENT": "10.0.0.1 4444 22", "SHLVL": "0"}
    read = subprocess.run(["bash", "-c", 'echo "$ENTERED"'], env=login, capture_output=True, text=True).stdout
    if "then bashrc" not in read:
        pytest.skip("this bash is built to read no ~/.bashrc below sshd")
    assert run(login, tmp_path, template) == "home"


@pytest.mark.parametrize("template", ["slurm", "pbs"])
def test_modules_are_loaded_before_what_needs_them(machine, tmp_path: Path, template: str):
    (Path(machine["HOME"]) / "crossfed" / "env.sh").write_text('export ENTERED="$ENTERED, then home"\n')
    assert run(machine, tmp_path, template, modules=["python/3.11", "cuda"]) == "modules python/3.11 cuda, then home"


@pytest.mark.parametrize(("gpu", "flag"), [("nvidia", ["--nv"]), ("amd", ["--rocm"]), ("none", [])])
def test_an_image_sees_its_gpus_and_its_paths(machine, tmp_path: Path, gpu: str, flag: list[str]):
    run(machine, tmp_path, "slurm", image="/images/a b.sif", gpu=gpu, bind=["/data/it's"])
    argv = Path(machine["RECORD"]).read_text().splitlines()
    binds = ["--bind", "/scratch/me", "--bind", f"{machine['HOME']}/crossfed", "--bind", "/data/it's"]
    assert argv[: len(flag) + 1] == ["exec", *flag] and argv[len(flag) + 1 :][: len(binds) + 2] == [
        *binds,
        "/images/a b.sif",
        "bash",
    ]
