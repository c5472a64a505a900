"""An sshd of its own on this machine, for benchmarks that move models over ssh."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@dataclass(frozen=True, kw_only=True)
class OwnSshd:
    pid: int
    deployment: dict[str, Any]
    """How a facility of federation.yml is reached by it."""


@contextmanager
def own_sshd(folder: Path, home: Path) -> Iterator[OwnSshd]:
    """Serve this account on a free port; `home`: of the coordinator, where the host's key is known.

    Commands find this Python first, and this checkout. What sessions read and wrote is added to sshd's own counters
    when they end.
    """
    if SSHD is None:
        raise RuntimeError("there is no sshd on this machine: install openssh-server")
    folder.mkdir(parents=True)
    for name in ("host", "id_ed25519"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = free_port()
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/id_ed25519.pub\nPasswordAuthentication no\nPermitRootLogin yes\n"
        f"MaxStartups 64\nMaxSessions 64\nSetEnv {' '.join(f'{name}={value}' for name, value in environment.items())}\n"
    )
    (home / ".ssh").mkdir(mode=0o700, parents=True)
    known = " ".join((folder / "host.pub").read_text().split()[:2])
    (home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{port} {known}\n")
    if getpass.getuser() == "root":
        Path("/run/sshd").mkdir(exist_ok=True)
    with open(folder / "log", "w") as log:
        process = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=log)
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield OwnSshd(
            pid=process.pid,
            deployment={
                "type": "ssh",
                "host": f"127.0.0.1:{port}",
                "user": getpass.getuser(),
                "key": str(folder / "id_ed25519"),
                "workdir": str(folder / "work"),
            },
        )
    finally:
        process.terminate()
        process.wait()
