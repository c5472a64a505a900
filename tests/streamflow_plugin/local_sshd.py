"""A real sshd on this machine that takes certificates only."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ports import free_port

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
PATIENT = "PerSourcePenalties no"
"""For an sshd that turns away, from OpenSSH 9.8 on, an address whose logins fail one after the other."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A site whose authority signs certificates."""

    port: int
    folder: Path
    process: int
    """The sshd that listens."""

    @property
    def key(self) -> Path:
        return self.folder / "id_ed25519"

    def sign(self, validity: str) -> None:
        """`validity` as `ssh-keygen -V` takes it."""
        words = ["-q", "-s", self.folder / "authority", "-I", "me", "-n", getpass.getuser(), "-V", validity]
        subprocess.run(["ssh-keygen", *words, self.key.with_suffix(".pub")], check=True)

    def show_certificate(self, validity: str) -> None:
        """Its host key has a certificate of the same authority from now on, for its address."""
        words = ["-q", "-s", self.folder / "authority", "-h", "-I", "site", "-n", "127.0.0.1", "-V", validity]
        subprocess.run(["ssh-keygen", *words, self.folder / "host.pub"], check=True)
        config = self.folder / "sshd_config"
        if (line := f"HostCertificate {self.folder}/host-cert.pub\n") not in config.read_text():
            config.write_text(line + config.read_text())
        log = self.folder / "sshd.log"
        before = log.read_text().count("Server listening")
        os.kill(self.process, signal.SIGHUP)
        for _ in range(4000):
            if log.read_text().count("Server listening") > before:
                break
            time.sleep(0.05)


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A parameter is a further line of its sshd_config."""
    for name in ("authority", "host", "id_ed25519"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    port = free_port()
    (tmp_path / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {tmp_path}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile none\nTrustedUserCAKeys {tmp_path}/authority.pub\nPasswordAuthentication no\n"
        f"SetEnv HOME={tmp_path}\n"  # no start-up file of whoever runs the tests, which may take a second each time
        f"{getattr(request, 'param', '')}\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True) if getpass.getuser() == "root" else None
    knows = subprocess.run([SSHD, "-t", "-f", tmp_path / "sshd_config", "-o", PATIENT], capture_output=True)
    patient = ["-o", PATIENT] if not knows.returncode else []
    (tmp_path / ".ssh").mkdir(mode=0o700)
    key = " ".join((tmp_path / "host.pub").read_text().split()[:2])
    (tmp_path / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{port} {key}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with open(tmp_path / "sshd.log", "w") as log:
        process = subprocess.Popen([SSHD, "-D", "-e", "-f", tmp_path / "sshd_config", *patient], stderr=log)
    try:
        for _ in range(4000):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield Site(port=port, folder=tmp_path, process=process.pid)
    finally:
        process.terminate()
        process.wait()
