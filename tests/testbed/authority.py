"""An ssh certificate authority for rehearsals: short-lived user certificates, and an sshd that accepts nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coordinator.testbed import daemons, namespaces
from coordinator.testbed.command import call, end, wait_until
from coordinator.testbed.layout import Site, Testbed


@dataclass(frozen=True, kw_only=True)
class Authority:
    """A signing key and the user keys that it signs, in one directory."""

    folder: Path

    @property
    def private(self) -> Path:
        return self.folder / "authority"

    def make(self) -> None:
        """Make the signing key."""
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.private)

    def key(self, name: str) -> Path:
        """Make a user's key, not signed yet; returns the private key's file."""
        path = self.folder / name
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path)
        return path

    def command(self, key: Path, user: str, validity: str, *, only: str = "") -> list[str]:
        """The command that signs a key for a login name. `validity`: as `ssh-keygen -V` takes it, such as `+5m`.

        `only`: the one command that the certificate lets run, such as a gate.
        """
        words = ["-q", "-s", self.private, "-I", f"{user}-of-the-testbed", "-n", user, "-V", validity]
        words += ["-O", "clear", "-O", f"force-command={only}"] if only else []
        return ["ssh-keygen", *map(str, words), f"{key}.pub"]

    def sign(self, key: Path, user: str, validity: str, *, only: str = "") -> None:
        call(*self.command(key, user, validity, only=only))


@dataclass(frozen=True, kw_only=True)
class CertificateDaemon:
    """A second sshd of a facility: certificates of one authority open it, bare keys do not."""

    site: Site
    port: int

    @property
    def address(self) -> str:
        return f"{self.site.address}:{self.port}"

    @property
    def log(self) -> Path:
        return self.site.log / f"certificates-{self.port}.log"

    def start(self, authority: Authority) -> None:
        """Start it and wait until it listens."""
        site, public = self.site, self.site.etc / f"authority-{self.port}.pub"
        public.write_text(authority.private.with_suffix(".pub").read_text())
        text = (site.etc / "sshd_config").read_text().replace("Port 22\n", f"Port {self.port}\n")
        text = text.replace(f"PidFile {site.run}/sshd.pid", f"PidFile {self._pid_file}")
        text = text.replace(
            f"AuthorizedKeysFile {site.etc}/authorized_keys", f"AuthorizedKeysFile none\nTrustedUserCAKeys {public}"
        )
        config = site.etc / f"certificates_{self.port}_config"
        config.write_text(text)
        call(*namespaces.enter(site, daemons.SSHD, "-f", config, "-E", self.log))
        wait_until(lambda: daemons.pid(self._pid_file) is not None, 10, f"start of the sshd at {self.address}")

    def stop(self) -> None:
        end([found] if (found := daemons.pid(self._pid_file)) else [])

    def cut(self) -> int:
        """End all open sessions of the facility's daemons, as sites do when a certificate ends; returns how many."""
        titles = {number: daemons.title(number) for number in namespaces.processes(self.site)}
        pids = [
            number
            for number, title in titles.items()
            if title.startswith(daemons.SESSIONS) and "[listener]" not in title
        ]
        end(pids)
        return len(pids)

    def known_host(self, testbed: Testbed) -> str:
        """The known_hosts line of this daemon: it has the facility's host key."""
        lines = testbed.known_hosts.read_text().splitlines()
        own = next(line for line in lines if line.split()[0] == self.site.address)
        return f"[{self.site.address}]:{self.port} {own.split(maxsplit=1)[1]}\n"

    @property
    def _pid_file(self) -> Path:
        return self.site.run / f"certificates-{self.port}.pid"
