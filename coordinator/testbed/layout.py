"""Layout of the testbed: its facilities, their addresses, users and files, and the state file that `down` reads."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path

from facility.exchange.errors import InputError
from facility.exchange.files.durable import write_text
from facility.exchange.files.owners import not_ours
from facility.exchange.json_values import values_in

DEFAULT_ROOT = Path("/var/tmp/crossfed-testbed")
MARK = "testbed.json"
NAME = re.compile(r"[a-z][a-z0-9-]{0,15}")


@dataclass(frozen=True, kw_only=True)
class Site:
    """One facility of the testbed."""

    name: str
    number: int
    """1, 2, ...: gives the third byte of its network."""
    tag: str
    """Prefix of every name this testbed makes on the host (namespaces, users, interfaces)."""
    network: int
    """Second byte of the private network 10.<network>.<number>.0/30."""
    base: Path
    """Everything of this facility lives below; only its own namespace and root see it."""

    @property
    def user(self) -> str:
        """Unprivileged account that owns the facility's files."""
        return f"{self.tag}-{self.name}"

    @property
    def namespace(self) -> str:
        return f"{self.tag}-{self.name}"

    @property
    def address(self) -> str:
        """The login node, as the coordinator reaches it."""
        return f"10.{self.network}.{self.number}.2"

    @property
    def coordinator_address(self) -> str:
        """The coordinator, as the facility sees it."""
        return f"10.{self.network}.{self.number}.1"

    @property
    def interface(self) -> str:
        """The coordinator's end of the link; the facility's end is `wan0`."""
        return f"{self.tag}v{self.number}"

    @property
    def nodes(self) -> tuple[str, str]:
        return f"{self.name}-1", f"{self.name}-2"

    @property
    def etc(self) -> Path:
        return self.base / "etc"

    @property
    def run(self) -> Path:
        return self.base / "run"

    @property
    def log(self) -> Path:
        return self.base / "log"

    @property
    def spool(self) -> Path:
        return self.base / "spool"

    @property
    def home(self) -> Path:
        """The user's home, mode 0700."""
        return self.base / "home"

    @property
    def code(self) -> Path:
        """The facility's own copy of the package `facility`, with `env.sh` beside it; belongs on its PYTHONPATH."""
        return self.home / "crossfed"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"


@dataclass(frozen=True, kw_only=True)
class Testbed:
    """The whole testbed, as its state file holds it."""

    __test__ = False  # no test class, whatever pytest thinks of the name
    root: Path
    tag: str
    python: Path
    """Interpreter that the facilities use: the one that ran `up`."""
    sites: tuple[Site, ...]

    @property
    def coordinator_home(self) -> Path:
        """HOME for everything the coordinator starts: its `.ssh` holds key, known hosts and a configuration."""
        return self.root / "coordinator" / "home"

    @property
    def key(self) -> Path:
        return self.coordinator_home / ".ssh" / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.coordinator_home / ".ssh" / "known_hosts"

    @property
    def ssh_config(self) -> Path:
        """For people: `ssh -F <this> site-a` (OpenSSH takes the home from the account, not from HOME)."""
        return self.coordinator_home / ".ssh" / "config"

    def site(self, name: str) -> Site:
        for site in self.sites:
            if site.name == name:
                return site
        raise InputError(
            f"no facility {name!r} in this testbed, expected one of {', '.join(site.name for site in self.sites)}"
        )

    def summary(self) -> dict[str, object]:
        """What a person or a script needs to use it."""
        return {
            "root": str(self.root),
            "home": str(self.coordinator_home),
            "ssh_config": str(self.ssh_config),
            "python": str(self.python),
            "facilities": [
                {
                    "name": site.name,
                    "host": site.address,
                    "user": site.user,
                    "home": str(site.home),
                    "code": str(site.code),
                    "partition": "main",
                    "nodes": list(site.nodes),
                }
                for site in self.sites
            ],
        }


def plan(root: Path, names: list[str], *, network: int, python: Path) -> Testbed:
    """The testbed that `up` would make. Raises `InputError` for names that Linux or Slurm would refuse."""
    if not names or len(names) > 60:
        raise InputError(f"{len(names)} facilities asked for, expected 1 to 60")
    for name in names:
        if not NAME.fullmatch(name):
            raise InputError(
                f"facility name {name!r}: expected up to 16 lower-case letters, digits and hyphens, a letter first"
            )
    if len(set(names)) != len(names):
        raise InputError(f"facility names {', '.join(names)} are not all different")
    tag = f"cf{network}"
    sites = tuple(
        Site(name=name, number=number, tag=tag, network=network, base=root / name)
        for number, name in enumerate(names, 1)
    )
    return Testbed(root=root, tag=tag, python=python, sites=sites)


def save(testbed: Testbed) -> None:
    """Write the state file."""
    state = dataclasses.asdict(testbed)
    write_text(testbed.root / MARK, json.dumps(state, default=str, indent=2) + "\n")


def load(root: Path) -> Testbed:
    """Read the state file. Raises `InputError` when there is no testbed under `root`, or another account's."""
    check_ours(root)
    try:
        state = values_in(root / MARK)
    except FileNotFoundError:
        raise InputError(f"no testbed under {root}: `crossfed testbed up --root {root}` makes one") from None
    sites = tuple(Site(**(site | {"base": Path(site["base"])})) for site in state["sites"])
    return Testbed(root=Path(state["root"]), tag=state["tag"], python=Path(state["python"]), sites=sites)


def check_ours(root: Path) -> None:
    """Raise `InputError` where another account may say what root starts, ends and removes there."""
    for place in (root, root / MARK):
        if reason := not_ours(place):
            raise InputError(f"{reason}, and a testbed is root's: remove it, or choose another --root")
