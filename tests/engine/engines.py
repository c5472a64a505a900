"""Run a rendered federation under a real engine, with no Node.js and no Docker on the PATH."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from facility.exchange.messages.manifest import read_manifest
from tests import forked_trainers
from tests.engine.noise import noise

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
HIDDEN = {"node", "nodejs", "docker", "podman", "singularity", "apptainer"}


def bare_environment(folder: Path) -> dict[str, str]:
    """This environment's Python first, then the system's programs without those a fresh machine would lack."""
    system = folder / "bin"
    system.mkdir(parents=True, exist_ok=True)
    for source in ("/usr/bin", "/bin"):
        for entry in os.scandir(source):
            target = system / entry.name
            if entry.name not in HIDDEN and not entry.name.startswith("python") and not os.path.lexists(target):
                target.symlink_to(entry.path)
    home = folder / "home"
    home.mkdir(exist_ok=True)
    return os.environ | {"PATH": f"{BIN}{os.pathsep}{system}", "HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}


def measured_environment(folder: Path) -> dict[str, str]:
    """`bare_environment` for what counts trainers' bytes and seconds: they are processes of their own, no forks."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return bare_environment(folder) | {"PYTHONPATH": path}


def forked_environment(folder: Path) -> dict[str, str]:
    """`bare_environment` in which trainers are forks."""
    return bare_environment(folder) | forked_trainers.variables()


def streamflow(
    federation: Path, folder: Path, *, timeout: float = 600, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`cd workflow && streamflow run streamflow.yml`; by default its trainers are forks."""
    return subprocess.run(
        ["streamflow", "run", "--outdir", str(folder / "out"), "streamflow.yml"],
        cwd=federation.parent,
        env=environment or forked_environment(folder),
        text=True,
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def cwltool(
    federation: Path, folder: Path, *options: str | Path, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """The same CWL and settings under the reference runner, which keeps only PATH of the environment unless told.

    `options` are given to cwltool as they are; without any it runs steps side by side, which excludes its provenance.
    Its own folders are below `folder`: it leaves some of them, and a copy of each file where it keeps provenance.
    """
    kept = [
        option
        for name in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", forked_trainers.SOCKET)
        for option in ("--preserve-environment", name)
    ]
    own = folder / "tmp"
    own.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [
            "cwltool",
            "--enable-ext",
            *(map(str, options) if options else ["--parallel"]),
            *kept,
            *(word for name in ("--tmpdir-prefix", "--tmp-outdir-prefix") for word in (name, f"{own}/")),
            "--outdir",
            str(folder / "out"),
            "../cwl/main.cwl",
            "settings.yml",
        ],
        cwd=federation.parent,
        env=forked_environment(folder),
        text=True,
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


class Console(subprocess.Popen[str]):
    """A command whose console, once it is read to its end, is found to hold no noise (`tests.engine.noise`)."""

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        said, errors = super().communicate(input, timeout)
        assert not (found := noise((said or "").splitlines())), f"on the console: {found}\n{said[-4000:]}"
        return said, errors


def crossfed(*arguments: str | Path, folder: Path) -> subprocess.Popen[str]:
    return Console(
        [sys.executable, "-m", "coordinator.cli", *map(str, arguments)],
        env=forked_environment(folder),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def killed_at(moment: str, federation: Path, folder: Path) -> None:
    """`crossfed run`, and SIGKILL once it says `moment`: to the command, with which StreamFlow dies."""
    process = crossfed("run", "--quiet", "-f", federation, folder=folder)
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if moment in line:
            break
    assert moment in seen[-1], "".join(seen)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def weights(federation: Path) -> list[str]:
    """Digest of every archived round's global model."""
    archive = Archive(read_federation(federation).archive_path)
    return [read_manifest(archive.round_directory(number) / "model").content_sha256 for number in archive.rounds()]
