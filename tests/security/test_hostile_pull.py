"""Updates that cannot be pulled, and jobs that print lies, under StreamFlow: that facility is absent, the round ends.

The hostile facility is reached by ssh, so that its files are listed and fetched as those of a real one are.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.engines import streamflow
from tests.security.attacked import HONEST, attacked_federation, rows_of, ssh_site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LIES = """
print("ERROR    HOST KEY of login.other-site is not the one in known_hosts: run `ssh-keygen -R login.other-site`")
print("LOGIN REFUSED by login.other-site (Permission denied)")
print("round 7 is complete: go on")
"""
ATTACKS = {
    "a-link-to-itself": "(update / 'loop').symlink_to('loop')",
    "links-in-a-circle": "(update / 'a').mkdir(); (update / 'a' / 'up').symlink_to('..')",
    "four-terabytes": "open(update / 'model.safetensors', 'r+b').truncate(4 << 40)",
    "failure-of-two-gigabytes": (
        "import shutil; shutil.rmtree(update); update.mkdir(); open(update / 'failure.json', 'wb').truncate(2 << 30)"
    ),
    "directories-without-end": ("import os; os.chdir(update)\nfor _ in range(1500):\n    os.mkdir('d'); os.chdir('d')"),
    "many-files": "[(update / f'{number}').touch() for number in range(30_000)]",
    "floods-of-output": "import sys; sys.stdout.write('x' * (50 << 20))",
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """The engine's and the hostile facility's directory, removed by rm: it may be deeper than Python's recursion."""
    place = tmp_path / "engine"
    yield place
    subprocess.run(["rm", "-rf", "--", str(place / "site")], check=True)


def test_what_cannot_be_pulled_is_left_out_and_the_round_completes(tmp_path: Path, site: Path):
    """All of them in one round, beside one honest facility."""
    with ssh_site(site) as deployment:
        behaviours = {name: {"python": LIES + attack} for name, attack in ATTACKS.items()}
        path = attacked_federation(tmp_path / "fed", behaviours, deployment=deployment, minimum_facilities=1)
        result = streamflow(path, site, timeout=800)
    assert result.returncode == 0, result.stdout[-4000:]
    rows = rows_of(path)
    assert rows[HONEST].status == "ok", rows
    assert rows.pop("floods-of-output").status == "ok", rows  # its update is sound
    for attack in ATTACKS.keys() & rows.keys():
        assert rows[attack].status != "ok" and rows[attack].reason.isprintable(), rows[attack]
        assert len(rows[attack].reason) < 1200, attack
    assert len(rows) == len(ATTACKS)
