"""Facilities of the testbed behind gates: any federation of the suite runs through them as it does through a shell.

    make testbed                                     # site-b is gated, site-a is not
    CROSSFED_TESTBED_GATED=site-a make testbed       # the other way round; empty: none
    CROSSFED_TESTBED_GATED=site-a,site-b make testbed

Each federation has a gate of its own: its key opens that and nothing else, and the policy holds its name, its workdir
and its job template. Tests that look at facilities with a shell have a key of their own, as a person there would.

The variable is for every federation of `federation.federate`. Others are as they are, whatever it says:

- `test_gate.py` and `test_gated_masking.py` are about gates, and put all facilities behind some; `test_masking.py`
  is the latter's twin with a shell, `test_quickstart.py` begins with one facility of each kind;
- `test_login_node.py` has no ssh that a gate could answer; `test_bundle.py` and `test_first_hour.py` are about how a
  facility's own people set it up, before there is a gate, `test_up_and_down.py` about the testbed;
- `test_plan.py` has nothing to gate: it reads the files and options of a testbed that nobody starts.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from coordinator.testbed.layout import Site, Testbed
from coordinator.testbed.rehearsal import ssh

VARIABLE = "CROSSFED_TESTBED_GATED"
DEFAULT = "site-b"
"""Names of the facilities that are gated where the variable is not set."""


def gated_sites() -> list[str]:
    """The facilities that every federation reaches through a gate."""
    return [name for name in os.environ.get(VARIABLE, DEFAULT).split(",") if name]


def policy(site: Site, fingerprint: str, **changes: object) -> str:
    values = {
        "facility": site.name,
        "federations": ["gated", "tight"],
        "keys": [fingerprint],
        "coordinators": f"{site.home}/gated/coordinators",
        "workdir": f"{site.home}/gated-work",
        "datasets": [f"{site.home}/dataset"],
        "scheduler": "slurm",
        "template": "testbed",
        "hours": 0.5,
        "ahead_seconds": 300,
    }
    return json.dumps(values | changes)


def put(testbed: Testbed, site: Site, name: str, text: str, *, home: str = "gated") -> None:
    """Write a file below the gate's home (relative to the user's)."""
    ssh(testbed, site, f"umask 077; mkdir -p {home} && cat > {home}/{name}", stdin=text.encode())


def open_gate(testbed: Testbed, site: Site, public_key: Path, *, home: str = "gated", coordinator: str = "") -> None:
    """Install the gate for a key, once; the testbed's sshd reads a file of its own.

    `coordinator`: its gate is one of several in `home`, each with a policy of its own.
    """
    allowed = site.etc / "authorized_keys"
    if public_key.read_text().split()[1] in allowed.read_text():
        return
    place = f"{home}/gates/{coordinator}" if coordinator else home
    put(testbed, site, public_key.name, public_key.read_text(), home=place)
    setup = f"bash crossfed/facility/setup.sh --home ~/{home} --as-is --no-self-check --authorized-keys ~/{place}/keys"
    setup += f" --gate ~/{place}/{public_key.name}" + (f" --coordinator {coordinator}" if coordinator else "")
    said = ssh(testbed, site, setup).stdout.decode()
    assert "and nothing else" in said, said
    with open(allowed, "a") as file:
        file.write((site.home / place / "keys").read_text())


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Of one federation: the key that opens its gates, and the one that signs its models."""

    folder: Path

    @property
    def gate(self) -> Path:
        return self.folder / "gate"

    @property
    def signer(self) -> Path:
        return self.folder / "signer"

    def make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for key in (self.gate, self.signer):
            if not key.exists():
                subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)

    @property
    def fingerprint(self) -> str:
        told = subprocess.run(
            ["ssh-keygen", "-lf", f"{self.gate}.pub"], capture_output=True, text=True, check=True
        ).stdout
        return told.split()[1]


def keys_of(testbed: Testbed, federation: str) -> Keys:
    """Those of a federation that `behind_gates` puts behind gates."""
    return Keys(folder=testbed.root / "coordinator" / "gates" / federation)


def gate_of(testbed: Testbed, site: Site, federation: str) -> str:
    """The forced command of a federation's gate, as a certificate may name it too."""
    return f"{site.home}/gate-{federation}/crossfed-gate {keys_of(testbed, federation).fingerprint}"


def behind_gates(testbed: Testbed, file: Path, names: list[str], *, home: str = "") -> None:
    """Change a rendered federation: these facilities are reached through gates, with the same template and workdir.

    `home`: one in which coordinators have a gate each (`setup.sh --coordinator`); '': the federation has its own.
    """
    if not names:
        return
    raw = yaml.safe_load(file.read_text())
    keys = keys_of(testbed, raw["name"])
    keys.make()
    raw["sending"] = raw.get("sending", {}) | {"signing_key": str(keys.signer)}
    for facility in raw["facilities"]:
        if facility["name"] in names:
            _put_behind(testbed, raw["name"], facility, folder=file.parent, keys=keys, home=home)
    file.write_text(yaml.safe_dump(raw, sort_keys=False))
    write_rendered(read_federation(file))


def _put_behind(testbed: Testbed, federation: str, facility: dict, *, folder: Path, keys: Keys, home: str) -> None:
    """Make the gate of one facility of `folder/federation.yml`, and have its deployment go through."""
    site, deployment = testbed.site(facility["name"]), facility["deployment"]
    place = f"{home}/gates/{federation}" if home else f"gate-{federation}"
    signer = " ".join(Path(f"{keys.signer}.pub").read_text().split()[:2])
    put(testbed, site, "job.sh", (folder / deployment.pop("template")).read_text(), home=place)
    put(testbed, site, "coordinators", f'{federation} namespaces="crossfed" {signer}\n', home=place)
    changes = {
        "federations": [federation],
        "coordinators": f"{site.home}/{place}/coordinators",
        "workdir": deployment["workdir"],
        "datasets": [facility["dataset"]],
        "scheduler": deployment["type"],
        "template": f"{site.home}/{place}/job.sh",
        "fill": deployment.pop("fill", {}) | deployment.pop("environment", {}),
    }
    put(testbed, site, "policy.yml", policy(site, keys.fingerprint, **changes), home=place)
    gate = {"home": home, "coordinator": federation} if home else {"home": place}
    open_gate(testbed, site, Path(f"{keys.gate}.pub"), **gate)
    deployment |= {"gate": True, "key": str(keys.gate)}
