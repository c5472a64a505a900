"""A new user's first hour: setup.sh alone on a site without network or modules, then from the coordinator over ssh."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from coordinator.config.federation import read_federation
from coordinator.remote_setup import set_up
from coordinator.testbed.layout import Testbed
from tests.testbed.conftest import ssh

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(600)]


def test_a_facility_is_set_up_by_its_user_and_by_the_coordinator(
    testbed: Testbed, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    site = testbed.sites[1]
    command = "bash crossfed/facility/setup.sh --home ~/by-hand --module python/3.11 --template testbed"
    told = ssh(testbed, site, command, timeout=400)
    assert told.returncode == 0 and "self-check: 1 rank" in told.stdout, told.stdout + told.stderr
    deployment = {
        "type": "slurm",
        "host": site.address,
        "user": site.user,
        "key": str(testbed.key),
        "known_hosts": str(testbed.known_hosts),
        "workdir": f"{site.home}/work",
        "template": str(site.code / "templates" / "testbed.sh"),
        "environment": {"home": "~/over ssh"},
    }
    facility = {"name": site.name, "dataset": "~/data", "deployment": deployment}
    file = tmp_path / "federation.yml"
    file.write_text(yaml.safe_dump({"name": "first", "model": "m", "rounds": 1, "facilities": [facility]}))
    set_up(read_federation(file), site.name, bundle=None, arguments=["--as-is"])
    assert "self-check: 1 rank" in capfd.readouterr().out
    for folder in ("by-hand", "over ssh"):
        shutil.rmtree(site.home / folder)
