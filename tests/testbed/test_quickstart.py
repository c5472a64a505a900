"""From two logins to a finished round by `crossfed quickstart` alone, over real sshd and Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.archive.rounds import Archive
from coordinator.quickstart.command import pairs
from coordinator.testbed.layout import Site, Testbed
from coordinator.testbed.rehearsal import job_template
from tests.conftest import ROOT
from tests.testbed.conftest import ssh
from tests.testbed.gates import Keys, open_gate, policy, put

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(900)]


def crossfed(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "coordinator.cli", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


def behind_a_gate(testbed: Testbed, site: Site, dataset: str) -> Keys:
    """The site's own people install a gate for a federation called `first`."""
    keys, home = Keys(folder=testbed.root / "coordinator" / "gates" / "first"), "gate-first"
    keys.make()
    signer = " ".join(Path(f"{keys.signer}.pub").read_text().split()[:2])
    put(testbed, site, "job.sh", job_template(1), home=home)
    put(testbed, site, "coordinators", f'first namespaces="crossfed" {signer}\n', home=home)
    changes = {"federations": ["first"], "datasets": [dataset], "workdir": f"{site.home}/work-first"}
    places = {"coordinators": f"{site.home}/{home}/coordinators", "template": f"{site.home}/{home}/job.sh"}
    fill = {"fill": {"partition": "main", "home": str(site.code)}}
    put(testbed, site, "policy.yml", policy(site, keys.fingerprint, **changes, **places, **fill), home=home)
    open_gate(testbed, site, Path(f"{keys.gate}.pub"), home=home)
    return keys


def test_from_nothing_to_a_finished_round_without_a_question(testbed: Testbed, material, tmp_path: Path):
    """The one site gives a shell, and is set up from here; the other has a gate, and set itself up."""
    open_site, gated = testbed.sites
    model, datasets = material
    keys = behind_a_gate(testbed, gated, datasets[gated.name])
    words = ["--key", str(testbed.key), "--known-hosts", str(testbed.known_hosts), "--model", str(model)]
    words += ["--key", f"{gated.name}={keys.gate}", "--answer", f"signing-key={keys.signer}", "--name", "first"]
    for site in testbed.sites:
        words += ["--facility", f"{site.name}={site.user}@{site.address}"]
    ssh(testbed, open_site, "cat /usr/share/common-licenses/GPL-3 /usr/share/common-licenses/Artistic > text.txt")
    words += ["--data", f"{open_site.name}=text.txt", "--answer", f"{open_site.name}.gpus=0"]
    words += ["--answer", f"{open_site.name}.home={open_site.home}/quick"]
    words += ["--rounds", "1", "--steps", "3", "--batch-sequences", "512", "--block-tokens", "64"]
    first = crossfed("quickstart", "fed", "--yes", *words, cwd=tmp_path)
    assert first.returncode == 0 and "all checks passed" in first.stdout, first.stdout + first.stderr
    assert re.search(r"batch_sequences: \d+, since the smallest dataset", first.stderr), first.stderr
    assert first.stderr.count(f"{gated.name}: behind a gate: its own people") == 1, first.stderr
    assert sum("digest " in line for line in first.stderr.splitlines()) == 1, "one tokenizer is sent, none to the gate"

    again = crossfed("quickstart", "fed", "--yes", *words, cwd=tmp_path)
    assert again.returncode == 0 and "going on with it" in again.stderr and "tokenizer sent" not in again.stderr

    done = crossfed("run", "--quiet", cwd=tmp_path / "fed")
    assert done.returncode == 0, done.stdout + done.stderr
    (entry,) = Archive(tmp_path / "fed" / ".crossfed" / "first" / "archive").history()
    assert {row.facility: row.status for row in entry.facilities} == {site.name: "ok" for site in testbed.sites}


def test_the_tutorial_runs_as_written(testbed: Testbed, tmp_path: Path):
    """But for the place and the numbers of this testbed, which stands already and stays."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "docs" / "tutorials" / "quickstart.md").read_text(), re.S)
    text = "".join(block for block in blocks if "crossfed testbed" not in block)
    for old, new in (
        ("/var/tmp/crossfed-testbed", str(testbed.root)),
        ("cf77-", f"{testbed.tag}-"),
        ("10.77.", testbed.sites[0].address.rsplit(".", 2)[0] + "."),
        ("--answer site-a.gpus=0", _own_home(testbed, 0)),
        ("--answer site-b.gpus=0", _own_home(testbed, 1)),
    ):
        assert old in text
        text = text.replace(old, new)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "1 of 1 round is complete" in done.stdout, done.stdout + done.stderr


def _own_home(testbed: Testbed, number: int) -> str:
    """The page's answer, and a home beside that of other tests of the same testbed."""
    site = testbed.sites[number]
    return f"--answer {site.name}.gpus=0 --answer {site.name}.home={site.home}/page"


def test_a_login_that_does_not_work_is_told_at_once(testbed: Testbed, tmp_path: Path):
    site = testbed.sites[0]
    login = ["--facility", f"a=nobody@{site.address}", "--data", "a=text.txt", "--key", str(testbed.key), "--yes"]
    refused = crossfed("quickstart", "fed", *login, "--known-hosts", str(testbed.known_hosts), cwd=tmp_path)
    assert refused.returncode != 0 and "does not accept our key" in refused.stderr + refused.stdout
    unknown = crossfed("quickstart", "fed", *login, "--known-hosts", str(tmp_path / "none"), cwd=tmp_path)
    assert unknown.returncode != 0 and "--answer a.host-key=FINGERPRINT" in unknown.stderr, unknown.stderr
    assert not (tmp_path / "none").exists() and not (tmp_path / "fed").exists()


def test_pairs_are_read_as_given():
    assert pairs("--data", ["a=x=y"]) == {"a": "x=y"}
