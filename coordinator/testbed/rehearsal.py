"""Everything a federation over the testbed needs: text at each facility, prepared there by its own user, and a small model."""

from __future__ import annotations

import json
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from coordinator.demo_material import Sizes, make
from coordinator.testbed.layout import Site, Testbed
from facility.exchange.errors import TryAgain

SIZES = Sizes(characters=80_000, vocabulary=400, block_tokens=32, hidden=32, layers=2, intermediate=64)
TEXTS = ("stdlib", "manual")


def ssh(
    testbed: Testbed, site: Site, command: str, *, stdin: bytes = b"", check: bool = True
) -> subprocess.CompletedProcess[bytes]:
    """Run a shell command at a facility as its user, as a person would. Raises `TryAgain` when it fails."""
    line = ["ssh", "-F", str(testbed.ssh_config), site.name, command]
    result = subprocess.run(line, input=stdin, capture_output=True)
    if check and result.returncode:
        said = (result.stderr or result.stdout).decode(errors="replace").strip()[-800:]
        raise TryAgain(f"{site.name}: `{command:.200}` ended with code {result.returncode}: {said}")
    return result


def copy_to(testbed: Testbed, site: Site, source: Path, target: str) -> None:
    """Copy a directory's content into `target` (relative to the user's home) at a facility."""
    packed = subprocess.run(["tar", "cf", "-", "-C", str(source), "."], capture_output=True, check=True).stdout
    place = shlex.quote(target)
    ssh(testbed, site, f"mkdir -p {place} && tar xf - -C {place}", stdin=packed)


def prepare_sites(testbed: Testbed, sizes: Sizes = SIZES) -> tuple[Path, dict[str, str]]:
    """Make a small model on the coordinator and a prepared dataset at every facility, each of another text.

    Returns the model's directory and the datasets' paths by facility. The text is written and tokenised at the facility,
    by its own user; nobody else can read it. What is there already is recognised.
    """
    material = testbed.root / "coordinator" / "material"
    make(material, sizes=sizes)
    arguments = (
        "--input text/train.jsonl --validation text/validation.jsonl --tokenizer tokenizer --out dataset --offline"
    )

    def prepare(site: Site) -> str:
        text = TEXTS[(site.number - 1) % len(TEXTS)]
        copy_to(testbed, site, material / "text" / text, "text")
        copy_to(testbed, site, material / "tokenizer", "tokenizer")
        command = f"umask 077; PYTHONPATH={site.code} {testbed.python} -m facility.prepare {arguments}"
        ssh(testbed, site, f"{command} --block-tokens {sizes.block_tokens}")
        return f"{site.home}/dataset"

    with ThreadPoolExecutor() as pool:
        datasets = dict(zip((site.name for site in testbed.sites), pool.map(prepare, testbed.sites), strict=True))
    return material / "model", datasets


def records(testbed: Testbed, site: Site) -> list[dict[str, str]]:
    """Slurm's own record of the facility's finished jobs (jobcomp/filetxt), oldest first."""
    path = site.log / "jobs.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]


def as_json(testbed: Testbed) -> str:
    return json.dumps(testbed.summary(), indent=2)
