"""Material of a federation over the testbed: a dataset at each facility, prepared by its user, and a small model."""

from __future__ import annotations

import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from coordinator.demo import Sizes, make_demo
from coordinator.testbed.layout import Site, Testbed
from facility.exchange.errors import TransientError
from facility.exchange.files.durable import write_text
from facility.exchange.files.paths import CHECKOUT
from facility.exchange.text import number_of

SIZES = Sizes(characters=80_000, vocabulary=400, block_tokens=32, hidden=32, layers=2, intermediate=64)
TEXTS = ("stdlib", "manual")


def ssh(testbed: Testbed, site: Site, command: str, *, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a shell command at a facility as its user, as a person would. Raises `TransientError` when it fails."""
    line = ["ssh", "-F", str(testbed.ssh_config), site.name, command]
    result = subprocess.run(line, input=stdin, capture_output=True)
    if result.returncode:
        said = (result.stderr or result.stdout).decode(errors="replace").strip()[-800:]
        raise TransientError(f"{site.name}: `{command:.200}` ended with code {result.returncode}: {said}")
    return result


def copy_to(testbed: Testbed, site: Site, source: Path, target: str) -> None:
    """Copy a directory's content into `target` (relative to the user's home) at a facility."""
    packed = subprocess.run(["tar", "cf", "-", "-C", str(source), "."], capture_output=True, check=True).stdout
    place = shlex.quote(target)
    ssh(testbed, site, f"mkdir -p {place} && tar xf - -C {place}", stdin=packed)


def prepare_sites(testbed: Testbed) -> tuple[Path, dict[str, str]]:
    """Make a small model on the coordinator and a prepared dataset at every facility, each of another text.

    Returns the model's directory and the datasets' paths by facility. The text is written and tokenised at the
    facility, by its own user; no other user can read it. What is there already is recognised.
    """
    material = testbed.root / "coordinator" / "material"
    make_demo(material, sizes=SIZES)
    arguments = (
        "--input text/train.jsonl --validation text/validation.jsonl --tokenizer tokenizer --out dataset --offline"
    )

    def prepare(site: Site) -> str:
        text = TEXTS[(site.number - 1) % len(TEXTS)]
        copy_to(testbed, site, material / "text" / text, "text")
        copy_to(testbed, site, material / "tokenizer", "tokenizer")
        command = f"umask 077; PYTHONPATH={site.code} {testbed.python} -m facility.prepare {arguments}"
        ssh(testbed, site, f"{command} --block-tokens {SIZES.block_tokens}")
        return f"{site.home}/dataset"

    with ThreadPoolExecutor() as pool:
        datasets = dict(zip((site.name for site in testbed.sites), pool.map(prepare, testbed.sites), strict=True))
    return material / "model", datasets


def records(testbed: Testbed, site: Site) -> list[dict[str, str]]:
    """Slurm's own record of the facility's finished jobs (jobcomp/filetxt), oldest first."""
    path = site.log / "jobs.log"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]


def job_template(tasks: int, prelude: str = "") -> str:
    """The testbed's job template: `tasks` ranks on one node, several of them started by srun; `prelude` comes first."""
    start = "srun --kill-on-bad-exit=0 " if tasks > 1 else ""
    return f"""\
#!/bin/bash
# The testbed: {number_of(tasks, "rank")} on one node, on the processor.
#SBATCH --partition=<partition>
#SBATCH --nodes=1
#SBATCH --ntasks-per-node={tasks}
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.log
{prelude}
. '<home>/env.sh'
IFS= read -r -d '' command <<'CROSSFED' || true
{{{{ streamflow_command }}}}
CROSSFED
{start}bash -c "$command"
"""


def write_federation(
    testbed: Testbed,
    folder: Path,
    model: Path,
    datasets: dict[str, str],
    *,
    name: str,
    rounds: int | dict[str, object],
    tasks: dict[str, int],
    prelude: str = "",
    workdir: str = "work",
    polling_seconds: int = 1,
    **more: object,
) -> Path:
    """Write `folder/workflow/federation.yml` for the testbed's facilities, with their job templates; returns it.

    `tasks`: ranks by facility, 1 where it says nothing. `more`: further keys of federation.yml.
    """
    place = folder / "workflow"
    place.mkdir(parents=True, exist_ok=True)
    facilities = []
    for site in testbed.sites:
        count = tasks.get(site.name, 1)
        template = place / f"{site.name}.sh"
        template.write_text(job_template(count, prelude), encoding="utf-8")
        facilities.append(
            {
                "name": site.name,
                "dataset": datasets[site.name],
                "deployment": {
                    "type": "slurm",
                    "host": site.address,
                    "user": site.user,
                    "key": str(testbed.key),
                    "known_hosts": str(testbed.known_hosts),
                    "workdir": f"{site.home}/{workdir}",
                    "template": template.name,
                    "fill": {"partition": "main"},
                    "environment": {"home": str(site.code)},
                    "polling_seconds": polling_seconds,
                    "retries": 200,
                    "retry_seconds": 2,
                },
            }
        )
    training = {"steps": 5, "batch_sequences": 4, "learning_rate": 1e-3, "device": "cpu"}
    content = {
        "name": name,
        "model": str(model),
        "rounds": rounds,
        "seed": 1,
        "archive": str(folder / "archive"),
        "workdir": str(folder / "work"),
        "training": training,
        "facilities": facilities,
    } | more
    file = place / "federation.yml"
    write_text(file, "# A rehearsal over the testbed.\n" + yaml.safe_dump(content, sort_keys=False))
    return file


def run(testbed: Testbed, *, rounds: int, quiet: bool = True) -> int:
    """Run or resume a federation over the testbed, two ranks under srun at its first site; returns the exit code.

    Another number of rounds than last time needs no further word: who gives it wants it.
    """
    model, datasets = prepare_sites(testbed)
    folder = testbed.root / "coordinator" / "federation"
    tasks = {testbed.sites[0].name: 2}
    file = write_federation(testbed, folder, model, datasets, name="rehearsal", rounds=rounds, tasks=tasks)
    environment = os.environ | {"HOME": str(testbed.coordinator_home)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), environment.get("PYTHONPATH")]))
    command = [str(testbed.python), "-m", "coordinator.cli", "run", "--federation", str(file), "--accept"]
    return subprocess.run([*command, *(["--quiet"] if quiet else [])], env=environment).returncode
