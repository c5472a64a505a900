"""Keys with which facilities and coordinator sign."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

FACILITIES, COORDINATOR = "abcd", "f"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a key for each facility and for the coordinator, and their files of allowed signers."""
    place = tmp_path_factory.mktemp("keys")
    for name in (*FACILITIES, COORDINATOR):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)], check=True)
    for file, names in (("facilities", FACILITIES), ("coordinators", COORDINATOR)):
        (place / file).write_text("".join(f"{name} {(place / f'{name}.pub').read_text()}" for name in names))
    return place
