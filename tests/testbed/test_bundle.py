"""A facility without internet is set up from a bundle, by its own user, and checks itself through its own queue."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from coordinator.bundle import make_bundle
from coordinator.testbed import namespaces
from coordinator.testbed.rehearsal import job_template

pytestmark = [pytest.mark.testbed, pytest.mark.slow, pytest.mark.timeout(1800)]  # downloads and installs a gigabyte


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The bundle; CROSSFED_BUNDLE names an existing one, CROSSFED_TORCH_INDEX an index with torch for CPUs."""
    if ready := os.environ.get("CROSSFED_BUNDLE"):
        return Path(ready)
    out = tmp_path_factory.mktemp("bundle")
    machine = sysconfig.get_platform().rpartition("-")[2]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    index = os.environ.get("CROSSFED_TORCH_INDEX", "")
    make_bundle(out, python=version, platform=f"manylinux_2_28_{machine}", torch="cpu", index=index)
    return out


def test_a_bundle_installs_where_no_index_can_be_reached(made: Path, testbed):
    site = testbed.sites[0]
    place = site.home / "bundle"
    shutil.copytree(made, place)
    (place / "job.sh").write_text(job_template(1))
    user = pwd.getpwnam(site.user)
    for path in (place, *place.rglob("*")):
        os.chown(path, user.pw_uid, user.pw_gid)
    home = site.home / "offline"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    reach = namespaces.enter(site, "getent", "hosts", "pypi.org", user=True)
    assert subprocess.run(reach, capture_output=True, timeout=60).returncode != 0, "the facility must have no internet"

    def setup() -> subprocess.CompletedProcess[str]:
        words = [
            "bash",
            place / "crossfed/facility/setup.sh",
            "--home",
            home,
            "--python",
            testbed.python,
            "--wheelhouse",
            place / "wheelhouse",
            "--template",
            place / "job.sh",
            "--fill",
            "partition=main",
        ]
        line = namespaces.enter(site, "PIP_INDEX_URL=http://127.0.0.1:9/", *words, user=True)
        return subprocess.run(line, capture_output=True, text=True, timeout=1500, env=environment)

    try:
        first = setup()
        assert first.returncode == 0, first.stdout + first.stderr
        assert "packages: torch for cpu, because the wheelhouse holds torch for CPUs" in first.stdout
        assert "self-check: 1 rank on" in first.stdout and "in three steps" in first.stdout, first.stdout
        second = setup()
        assert second.returncode == 0 and "packages: unchanged" in second.stdout and "passed before" in second.stdout
        assert json.loads((place / "bundle.json").read_text())["torch"] == "cpu"
        jobs = (site.log / "jobs.log").read_text()
        assert "crossfed-selfcheck" in jobs and "JobState=COMPLETED" in jobs
        print(first.stdout)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(home, ignore_errors=True)
