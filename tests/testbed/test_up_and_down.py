"""Two real facilities come up on this machine, keep apart from one another, and go without a trace."""

from __future__ import annotations

import pwd
import re
import subprocess
import time
from pathlib import Path

import pytest

from coordinator.testbed import daemons, link, namespaces, stand
from coordinator.testbed.layout import Testbed, load
from facility.exchange.errors import InputError, TransientError
from facility.exchange.process_start import started_at
from tests.testbed.conftest import ssh

pytestmark = pytest.mark.testbed


NAME = re.compile(r"\bcf\d+|crossfed-testbed-")
"""Of a testbed: its users, links and namespaces, or its root and what is mounted there."""


def traces() -> dict[str, set[str]]:
    """What a testbed could leave on the host."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout.splitlines()
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    mounts = Path("/proc/mounts").read_text().splitlines()
    return {
        "users": {entry.pw_name for entry in pwd.getpwall()},
        "links": {line.split(": ")[1] for line in links},
        "namespaces": {line.split()[0] for line in spaces},
        "mounts": {line.split()[1] for line in mounts},
        "roots": {str(path) for path in Path("/var/tmp").iterdir()},
    }


def changed(before: dict[str, set[str]], own: Testbed) -> set[str]:
    """What came or went since, but for what other testbeds, which tests beside these may use, are named by."""
    differing = {one for kind, now in traces().items() for one in now ^ before[kind]}
    return {one for one in differing if not NAME.search(one) or own.tag in one or own.root.name in one}


def test_up_and_down_leave_nothing(tmp_path: Path):
    before = traces()
    root = Path(f"/var/tmp/crossfed-testbed-{time.monotonic_ns()}")
    testbed = stand.up(root, ["east"], shapes={"east": link.Shape(round_trip_seconds=0.05)})
    site = testbed.site("east")
    pids = namespaces.processes(site)
    assert len(pids) >= 6  # holder, munged, slurmctld, two slurmd, sshd
    assert ssh(testbed, site, "sbatch --wrap 'sleep 600' && sleep 2").returncode == 0  # a running job must go too
    pids = namespaces.processes(site)
    assert changed(before, testbed) >= {site.user, site.namespace, str(root)}
    gone = stand.down(root)
    assert any("user" in line for line in gone)
    assert changed(before, testbed) == set()
    assert not [pid for pid in pids if started_at(pid) is not None]
    with pytest.raises(InputError, match="no testbed under"):
        stand.down(root)


def test_a_failed_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    before = traces()
    root = Path(f"/var/tmp/crossfed-testbed-{time.monotonic_ns()}")
    start, failed = daemons.start, []

    def failing(site, service, *, clean=False):
        if (site.name, service) == ("west", "slurmd"):
            failed.append(load(root))
            raise TransientError("slurmd did not start")
        start(site, service, clean=clean)

    monkeypatch.setattr(daemons, "start", failing)
    with pytest.raises(TransientError, match="slurmd did not start"):
        stand.up(root, ["east", "west"])
    assert changed(before, failed[0]) == set()


def test_a_directory_with_other_files_is_refused_and_kept(tmp_path: Path):
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(InputError, match="holds other files"):
        stand.up(tmp_path, ["east"])
    assert (tmp_path / "precious").read_text() == "mine"


def test_srun_spans_two_nodes_with_stand_in_gpus(testbed):
    site = testbed.site("site-a")
    result = ssh(
        testbed,
        site,
        "srun --nodes=2 --ntasks-per-node=2 --gpus-per-node=2 sh -c 'echo $SLURM_PROCID $(hostname) "
        "$CUDA_VISIBLE_DEVICES'",
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        "0 site-a-1 0,1",
        "1 site-a-1 0,1",
        "2 site-a-2 0,1",
        "3 site-a-2 0,1",
    ]


def test_the_user_runs_the_python_of_the_coordinator_and_its_own_copy_of_the_facility_package(testbed):
    site = testbed.site("site-b")
    code = "import torch, facility; print(facility.__file__)"
    result = ssh(testbed, site, f"PYTHONPATH={site.code} {testbed.python} -c '{code}'")
    assert result.stdout.strip() == f"{site.code}/facility/__init__.py", result.stderr


def test_a_facility_cannot_reach_the_files_of_another_or_of_the_coordinator(testbed):
    a, b = testbed.sites
    assert ssh(testbed, a, "umask 077; mkdir -p data && echo secret > data/rows.txt").returncode == 0
    secret = a.home / "data" / "rows.txt"
    assert secret.read_text() == "secret\n"
    for path in (secret, testbed.key, testbed.coordinator_home):
        from_b = ssh(testbed, b, f"cat {path} || ls {path}")
        assert from_b.returncode != 0 and "secret" not in from_b.stdout
    # Not only hidden by the namespace: outside it, permissions alone refuse.
    for user, path in ((b.user, secret), (a.user, b.home), (a.user, testbed.key), (b.user, a.etc / "munge.key")):
        outside = subprocess.run(
            ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "cat", str(path)],
            capture_output=True,
            text=True,
        )
        assert outside.returncode != 0 and "Permission denied" in outside.stderr, (user, path, outside)


def test_the_clusters_do_not_trust_one_another(testbed):
    a, b = testbed.sites
    made = subprocess.run(
        namespaces.enter(a, "munge", f"--socket={a.run}/munge.sock", "-n"), capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    read = subprocess.run(
        namespaces.enter(b, "unmunge", f"--socket={b.run}/munge.sock"),
        input=made.stdout,
        capture_output=True,
        text=True,
    )
    assert read.returncode != 0 and "Invalid credential" in read.stdout + read.stderr


def test_login_needs_a_known_host_and_the_key(testbed):
    site = testbed.sites[0]
    assert ssh(testbed, site, "true").returncode == 0
    known = [
        "-o",
        f"UserKnownHostsFile={testbed.known_hosts}",
        "-o",
        "StrictHostKeyChecking=yes",
        "-o",
        "BatchMode=yes",
    ]
    for options, said in (
        (
            ["-o", "UserKnownHostsFile=/dev/null", "-o", "StrictHostKeyChecking=yes", "-i", str(testbed.key)],
            "Host key verification failed",
        ),
        (["-F", "/dev/null", *known], "Permission denied (publickey)"),
    ):
        refused = subprocess.run(
            ["ssh", *options, f"{site.user}@{site.address}", "true"], capture_output=True, text=True
        )
        assert refused.returncode == 255 and said in refused.stderr, refused


def test_a_stopped_service_comes_back_and_slurm_keeps_its_jobs(testbed):
    site = testbed.site("site-b")
    job = ssh(testbed, site, "sbatch --parsable --wrap 'sleep 5; echo done > kept.txt'").stdout.strip()
    daemons.stop(site, "slurmctld")
    assert ssh(testbed, site, "squeue").returncode != 0
    daemons.start(site, "slurmctld")
    deadline = time.monotonic() + 200
    while "COMPLETED" not in (state := ssh(testbed, site, f"scontrol show job {job}").stdout):
        assert time.monotonic() < deadline, state
        time.sleep(1)
    assert (site.home / "kept.txt").read_text() == "done\n"


def test_links_are_shaped(testbed):
    site = testbed.site("site-a")
    try:
        assert link.round_trip(site) < 0.02
        link.apply(site, link.Shape(round_trip_seconds=0.1))
        assert 0.1 <= link.round_trip(site) < 0.13
        link.apply(site, link.Shape(rate_bits_per_second=40e6))
        line, took = ["ssh", "-F", str(testbed.ssh_config), "site-a", "cat > /dev/null"], []
        for _ in range(3):
            start = time.monotonic()
            subprocess.run(line, input=bytes(10_000_000), check=True)
            took.append(time.monotonic() - start)
        assert 1.5 < min(took) < 12  # 80 Mbit at 40 Mbit/s take 2 s; the login counts, and a busy machine adds to it
    finally:
        link.apply(site, link.Shape())
    assert link.round_trip(site) < 0.02


def test_the_state_file_tells_everything(testbed):
    assert load(testbed.root) == testbed
