"""The README is true: its federation is the shipped one, its commands run; CONTRIBUTING's tree is the disk's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from tests.conftest import ROOT
from tests.house import tree

README = (ROOT / "README.md").read_text()
SHELL = re.findall(r"```bash\n(.*?)```", README, re.S)


def test_the_tree_is_what_the_disk_holds():
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout: what is tracked cannot be listed")
    assert tree.BEGIN + tree.tree() + tree.END in (ROOT / "CONTRIBUTING.md").read_text(), (
        "stale: run `python -m tests.house.tree --write`"
    )


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_the_federation_shown_is_the_shipped_one():
    shipped = (ROOT / "workflow" / "federation.yml").read_text()
    shown = [block for block in re.findall(r"```yaml\n(.*?)```", README, re.S) if block.startswith("name: demo")]
    assert len(shown) == 1 and shown[0] in shipped


def test_every_command_named_in_the_text_exists():
    text = subprocess.run([sys.executable, "-m", "coordinator.cli", "--help"], capture_output=True, text=True).stdout
    for name in set(re.findall(r"`crossfed (\w+)", README)):
        assert re.search(rf"│ {name}\s", text), f"crossfed {name}"
    for module in set(re.findall(r"python -m ((?:facility|coordinator)[.\w]+)", README)):
        assert subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True).returncode == 0, module


@pytest.mark.readme
@pytest.mark.timeout(900)
def test_the_commands_of_the_readme_run_as_written(tmp_path: Path):
    """In a clean clone, in the environment that `make` made; `make test` is this suite and is not started again."""
    environment = Path(sys.prefix)
    if not (environment / ".ready").exists():
        pytest.skip("this environment was not made by `make env`, so `make demo` would make another")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    (environment / ".ready").touch()  # newer than the clone's files
    variables = os.environ | {"PYTHONPATH": str(clone), "HOME": str(tmp_path), "VENV": str(environment)}
    first, second = SHELL[0].splitlines(), SHELL[1].splitlines()
    assert first == ["make demo", "make test"]
    shown = run("make demo", clone, variables)
    rounds = read_federation(clone / "workflow" / "federation.yml").rounds
    last = f".crossfed/demo/archive/round-{rounds - 1:04d}/model"
    assert last in README
    assert f"all {rounds} rounds are done" in shown and "the model is" in shown
    perplexities = [float(x) for x in re.findall(r"│\s+([\d.]+) │$", shown, re.M)]
    assert len(perplexities) == rounds and perplexities == sorted(perplexities, reverse=True), shown
    rows = [row for entry in Archive(clone / ".crossfed" / "demo" / "archive").history() for row in entry.facilities]
    for name in {row.facility for row in rows}:  # no facility gets worse from one round to the next
        told = [row.perplexity_received for row in rows if row.facility == name]
        received = [one for one in told if one is not None]
        assert len(received) >= rounds and received == sorted(received, reverse=True), (name, received)
    again = run("\n".join(second).replace(".venv/", f"{environment}/"), clone, variables)
    assert "COMPLETED workflow execution" in again
    assert f"{rounds} of {rounds} rounds" in run("python -m coordinator.cli status", clone, variables)
    load = (
        "import sys; from transformers import AutoModelForCausalLM as M; "
        "print(M.from_pretrained(sys.argv[1]).num_parameters())"
    )
    assert int(run(f'python -c "{load}" {last}', clone, variables).split()[-1]) > 100_000


def run(script: str, folder: Path, variables: dict[str, str]) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=variables | {"PATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}"
    return done.stdout
