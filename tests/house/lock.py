"""Write facility/requirements.lock: a facility's packages but torch, by version and sha256, for pip's --require-hashes.

    python -m tests.house.lock [--reports FOLDER]    # needs a package index; run it when constraints.txt changes

One line a package, with the digest of the wheel of each Python and machine below. torch is left out, with what only its
builds need (CUDA's libraries, Triton): its build fits the site's GPUs and comes from the index that the site names.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from facility.exchange.files.durable import write_text

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "facility" / "requirements.lock"
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
GLIBC = 28
"""The least minor version of glibc 2."""
OF_TORCH = re.compile(r"torch|triton|nvidia-.*|cuda-.*")


def normal(name: str) -> str:
    """A distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(requirements: Iterable[str]) -> set[str]:
    """The distributions that requirements name."""
    return {normal(re.match(r"[A-Za-z0-9_.-]+", one)[0]) for one in requirements}  # type: ignore[index]


def reported(folder: Path, python: str, machine: str, packages: Sequence[str]) -> Any:
    """pip's report on what it would install there; `packages`: these alone, none: what a facility depends on."""
    out = folder / f"report-{machine}-{python}.json"
    if not out.exists():
        wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
        for minor in range(GLIBC, 4, -1):
            command += ["--platform", f"manylinux_2_{minor}_{machine}"]
        command += ["--platform", f"manylinux2014_{machine}", "--target", str(folder / "none"), "--report", str(out)]
        command += ["--no-deps", *packages] if packages else ["-c", str(ROOT / "constraints.txt"), *wanted]
        subprocess.run(command, check=True)
    return json.loads(out.read_text())


def pins(report: Any) -> list[str]:
    """The packages of a report but torch's, as `name==version`."""
    found = {one["metadata"]["name"]: one["metadata"]["version"] for one in report["install"]}
    return [f"{name}=={version}" for name, version in found.items() if not OF_TORCH.fullmatch(name.lower())]


def lines(reports: Iterable[Any]) -> list[str]:
    """The packages of all reports, by name. Raises `ValueError` where two of them hold different versions of one."""
    versions: dict[str, str] = {}
    digests: dict[str, set[str]] = {}
    for report in reports:
        for entry in report["install"]:
            name = normal(entry["metadata"]["name"])
            version = entry["metadata"]["version"]
            if OF_TORCH.fullmatch(name):
                continue
            if versions.setdefault(name, version) != version:
                raise ValueError(f"{name} is {versions[name]} and {version}: pin it in constraints.txt")
            digests.setdefault(name, set()).add(entry["download_info"]["archive_info"]["hashes"]["sha256"])
    return [
        " ".join([f"{name}=={versions[name]}", *(f"--hash=sha256:{one}" for one in sorted(digests[name]))])
        for name in sorted(versions)
    ]


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reports", type=Path, help="folder with pip's reports, kept and used again")
    folder = parser.parse_args().reports
    with tempfile.TemporaryDirectory() as temporary:
        places = [(python, machine) for machine in MACHINES for python in PYTHONS]
        first, *others = places  # torch need not be there for every Python and machine, and its dependencies are known
        found = [reported(folder or Path(temporary), *first, [])]
        found += [reported(folder or Path(temporary), *place, pins(found[0])) for place in others]
        packages = lines(found)
    head = [
        "# Written by `python -m tests.house.lock`; facility/setup.sh installs from it by --require-hashes --no-deps.",
        "# for: " + " ".join(f"{python}-{machine}" for python, machine in places),
    ]
    write_text(LOCK, "\n".join([*head, *packages]) + "\n")


if __name__ == "__main__":
    main()
