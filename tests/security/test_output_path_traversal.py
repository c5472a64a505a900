"""A facility's job leaves its own `cwl.output.json`: no file is written anywhere for it, and the round completes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.engine.engines import streamflow
from tests.security.attacked import HONEST, HOSTILE, attacked_federation, rows_of, ssh_site

PAYLOAD = (
    "from pathlib import Path\np = Path('payload')\np.mkdir()\n(p / 'authorized_keys').write_text('ssh-ed25519 EVIL')\n"
)


def claims(victim: Path) -> dict[str, object]:
    """What the hostile job may write, by the name of the attack."""
    directory = {"class": "Directory", "path": "payload"}
    return {
        "absolute": {"update": directory | {"basename": str(victim)}},
        "upwards": {"update": directory | {"basename": "../" * 12 + str(victim).lstrip("/")}},
        "listing": {
            "update": {"class": "Directory", "basename": "x", "listing": [directory | {"basename": str(victim)}]}
        },
        "literal": {"update": {"class": "File", "basename": str(victim / "authorized_keys"), "contents": "EVIL"}},
        "another path": {"update": {"class": "Directory", "path": str(victim.parent)}},
    }


@pytest.mark.parametrize(
    "way, attack",
    [
        ("local", "absolute"),
        ("ssh", "upwards"),
        *(
            pytest.param(way, attack, marks=pytest.mark.slow)
            for way, attack in (
                ("local", "literal"),
                ("local", "listing"),
                ("ssh", "absolute"),
                ("ssh", "literal"),
                ("ssh", "another path"),
            )
        ),
    ],
)
def test_the_victim_stays_untouched_and_the_round_completes(tmp_path: Path, way: str, attack: str):
    victim = tmp_path / "home" / "x" / ".ssh"
    victim.parent.mkdir(parents=True)
    told = json.dumps(claims(victim)[attack])
    with ssh_site(tmp_path / "engine") if way == "ssh" else nullcontext() as deployment:
        behaviour = {"leaves": {"cwl.output.json": told}, "python": PAYLOAD}
        path = attacked_federation(tmp_path / "fed", behaviour, deployment=deployment)
        result = streamflow(path, tmp_path / "engine")
    assert not victim.exists() and not victim.is_symlink(), result.stdout[-3000:]
    assert result.returncode == 0, result.stdout[-4000:]
    rows = rows_of(path)
    assert rows[HONEST].status == "ok", rows
    assert rows[HOSTILE].status == "ok", rows  # its sound update counts, what it claims beside it does not
