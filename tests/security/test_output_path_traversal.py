"""A facility's job leaves its own `cwl.output.json`: no file is written anywhere for it, and the round completes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.engine.engines import streamflow
from tests.security.attacked import HONEST, attacked_federation, rows_of, ssh_site

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
        "another-path": {"update": {"class": "Directory", "path": str(victim.parent)}},
    }


@pytest.mark.parametrize(
    "way, attacks",
    [
        ("ssh", ["upwards"]),
        pytest.param("local", ["absolute", "literal", "listing"], marks=pytest.mark.slow),
        pytest.param("ssh", ["absolute", "literal", "another-path"], marks=pytest.mark.slow),
    ],
)
def test_the_victim_stays_untouched_and_the_round_completes(tmp_path: Path, way: str, attacks: list[str]):
    victims = {attack: tmp_path / attack / "x" / ".ssh" for attack in attacks}
    behaviours = {}
    for attack, victim in victims.items():
        victim.parent.mkdir(parents=True)
        behaviours[attack] = {"leaves": {"cwl.output.json": json.dumps(claims(victim)[attack])}, "python": PAYLOAD}
    with ssh_site(tmp_path / "engine") if way == "ssh" else nullcontext() as deployment:
        path = attacked_federation(tmp_path / "fed", behaviours, deployment=deployment)
        result = streamflow(path, tmp_path / "engine")
    for victim in victims.values():
        assert not victim.exists() and not victim.is_symlink(), result.stdout[-3000:]
    assert result.returncode == 0, result.stdout[-4000:]
    # A hostile facility's sound update counts; what it claims beside it does not.
    assert {name: row.status for name, row in rows_of(path).items()} == dict.fromkeys([HONEST, *attacks], "ok")
