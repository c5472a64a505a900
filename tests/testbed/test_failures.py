"""Failures at facilities, rehearsed: each ends in a round without the facility, in waiting, or in a clear message."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from streamflow.core.deployment import ExecutionLocation

from coordinator.streamflow_plugin.ssh import ParallelSSHConnector
from coordinator.testbed import daemons, link, namespaces
from facility.exchange.messages.manifest import read_manifest
from tests.testbed.conftest import ssh
from tests.testbed.federation import ROOT, federate, jobs
from tests.testbed.kill import kill_coordinator
from tests.testbed.quiet import wait_for_quiet

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(600)]


def queue_ids(testbed, site) -> list[str]:
    return ssh(testbed, site, "squeue -h -o %i").stdout.split()


def wait_for_job(testbed, site, state: str = "RUNNING", seconds: float = 120) -> str:
    """Id of the facility's job once it is in this state."""
    deadline = time.monotonic() + seconds
    while True:
        ids = ssh(testbed, site, f"squeue -h -t {state} -o %i").stdout.split()
        if ids:
            return ids[0]
        assert time.monotonic() < deadline, f"no job {state} at {site.name}"
        time.sleep(0.5)


def test_a_cancelled_job_and_one_out_of_time_cost_their_facility_the_round_and_no_more(testbed, material, tmp_path):
    a, b = testbed.sites
    run = federate(testbed, tmp_path, *material, name="killed", rounds=3, delay=6)
    thread = run.start()
    job = wait_for_job(testbed, a)
    wait_for_job(testbed, b)
    time.sleep(2)
    (b.home / "slow").touch()  # site-b's next job sleeps beyond its time limit
    assert ssh(testbed, a, f"scancel {job}").returncode == 0
    run.wait_for("round 0 is complete", 180)
    job = wait_for_job(testbed, b)
    (b.home / "slow").unlink()
    subprocess.run(namespaces.enter(b, "scontrol", "update", f"JobId={job}", "TimeLimit=00:01:00"), check=True)
    thread.join(400)
    assert run.result is not None and run.result[0] == 0, run.text()
    assert "CANCELLED" in run.wait_for("of facility-site-a did not end well")
    assert "TIMEOUT" in run.wait_for("of facility-site-b did not end well")
    without = [re.search(r"round (\d) goes on without (\S+):", line) for line in run.log]
    assert [(m[1], m[2]) for m in without if m] == [("0", "site-a"), ("1", "site-b")]
    assert len(run.archive.rounds()) == 3
    kept = {
        read_manifest(path.parent).round
        for path in (b.home / "work").glob("*/*/manifest.json")
        if read_manifest(path.parent).federation == "killed"
    }
    assert kept <= {1, 2}  # the present and the previous round's; older ones are swept away
    assert [record["JobState"] for record in jobs(run, a)] == ["CANCELLED", "COMPLETED", "COMPLETED"]
    assert [record["JobState"] for record in jobs(run, b)] == ["COMPLETED", "TIMEOUT", "COMPLETED"]


def test_a_full_disk_at_a_facility_costs_it_the_rounds_until_there_is_room_and_says_so(testbed, material, tmp_path):
    a, b = testbed.sites
    place = a.home / "small"
    place.mkdir()
    os.chown(place, a.home.stat().st_uid, a.home.stat().st_gid)
    owner = f"uid={a.home.stat().st_uid},gid={a.home.stat().st_gid},mode=0700"
    subprocess.run(namespaces.enter(a, "mount", "-t", "tmpfs", "-o", f"size=4m,{owner}", "tmpfs", place), check=True)
    try:
        ssh(testbed, a, "cat /dev/zero > small/filling")  # not one byte is left, not for the settings either
        run = federate(testbed, tmp_path, *material, name="full", rounds=3, delay=2, workdir="small")
        thread = run.start()
        run.wait_for("round 0 goes on without site-a")
        ssh(testbed, a, "rm small/filling")
        thread.join(300)
        assert run.result is not None and run.result[0] == 0, run.text()
        assert "site-a is left out of the round: copying" in run.wait_for("No space left on device")
        assert "No space left on device" in run.wait_for("round 0 goes on without site-a"), run.text()
        assert len(run.archive.rounds()) == 3
        absent = [str(number) for number in (1, 2) if f"round {number} goes on without site-a" in run.text()]
        assert absent == [], run.text()
        assert [record["JobState"] for record in jobs(run, a)] == ["COMPLETED"] * 2  # none begins without its model
        assert [record["JobState"] for record in jobs(run, b)] == ["COMPLETED"] * 3
    finally:
        wait_for_quiet(a)
        subprocess.run(namespaces.enter(a, "umount", place), check=True)


def test_a_minute_without_sshd_and_half_a_minute_without_slurmctld_cost_nothing(testbed, material, tmp_path):
    a, b = testbed.sites
    run = federate(testbed, tmp_path, *material, name="outage", rounds=1, delay=12, minimum=2)
    thread = run.start()
    wait_for_job(testbed, a)
    wait_for_job(testbed, b)
    daemons.stop(a, "sshd")
    daemons.stop(b, "slurmctld")
    try:
        time.sleep(30)
    finally:
        daemons.start(b, "slurmctld")
    try:
        time.sleep(30)
    finally:
        daemons.start(a, "sshd")
    thread.join(300)
    assert run.result is not None and run.result[0] == 0, run.text()
    assert any("says nothing of job" in line for line in run.log), run.text()
    for site in testbed.sites:
        assert [record["JobState"] for record in jobs(run, site)] == ["COMPLETED"]  # never submitted again
    assert not any("goes on without" in line for line in run.log)


def test_a_wrong_host_key_ends_the_run_with_a_sentence_and_submits_nothing(testbed, material, tmp_path):
    a, b = testbed.sites
    run = federate(testbed, tmp_path, *material, name="hostkey", rounds=1)
    known = testbed.known_hosts.read_text()
    other = known.splitlines()[1].split()[1:]
    wrong = [" ".join([a.address, *other]) if line.startswith(a.address) else line for line in known.splitlines()]
    testbed.known_hosts.write_text("\n".join(wrong) + "\n")
    try:
        code = run.run(restarts=5)
    finally:
        testbed.known_hosts.write_text(known)
    assert code != 0 and run.result is not None and "starting again" not in run.text()
    assert f"host key of {a.address}" in run.result[1] and "ssh-keygen -R" in run.result[1], run.text()
    assert jobs(run, a) == []
    assert queue_ids(testbed, a) == [] and queue_ids(testbed, b) == []


def test_a_killed_coordinator_finds_its_running_job_again_and_trains_nothing_twice(testbed, material, tmp_path):
    a, b = testbed.sites
    run = federate(testbed, tmp_path, *material, name="killed9", rounds=1, delay=15, minimum=2)
    command = [sys.executable, "-m", "tests.testbed.federation", str(testbed.root), str(run.file)]
    first = subprocess.Popen(
        command, cwd=ROOT, env=run.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for_job(testbed, a)
    wait_for_job(testbed, b)
    kill_coordinator(first)
    assert run.run() == 0, run.text()
    assert any("of an earlier run has begun (RUNNING): waiting for its end" in line for line in run.log), run.text()
    for site in testbed.sites:
        records = jobs(run, site)
        assert [record["JobState"] for record in records] == ["COMPLETED"] * 2
        assert records[0]["EndTime"] <= records[1]["StartTime"]  # never two of one round at a time
    again = [line for line in run.log if "was finished before from the same model" in line]
    assert len(again) == 2, run.text()
    assert len(run.archive.rounds()) == 1


def test_stopping_leaves_no_job_behind(testbed, material, tmp_path):
    a, b = testbed.sites
    run = federate(testbed, tmp_path, *material, name="stopped", rounds=1, delay=60)
    supervisor = run.supervisor()
    result = []
    thread = threading.Thread(target=lambda: result.append(supervisor.run()), daemon=True)
    thread.start()
    wait_for_job(testbed, a)
    wait_for_job(testbed, b)
    supervisor.stop(signal.SIGINT)
    thread.join(90)
    assert result and result[0][0] == 128 + signal.SIGINT, run.text()
    for site in testbed.sites:
        deadline = time.monotonic() + 200
        while queue_ids(testbed, site):
            assert time.monotonic() < deadline, f"a job is left at {site.name}"
            time.sleep(0.5)
        assert [record["JobState"] for record in jobs(run, site)] == ["CANCELLED"]
        wait_for_quiet(site)


@pytest.mark.parametrize("way", ["push", "pull"])
def test_sshd_away_during_a_transfer_costs_only_time(testbed, tmp_path: Path, way: str):
    site = testbed.site("site-a")
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    content = os.urandom(48_000_000)
    (source / "model.safetensors").write_bytes(content)
    link.apply(site, link.Shape(rate_bits_per_second=80e6))
    connector = ParallelSSHConnector(
        "facility-site-a",
        str(tmp_path),
        nodes=[site.address],
        username=site.user,
        sshKey=str(testbed.key),
        retries=60,
        retryDelay=1,
    )
    location = ExecutionLocation(name=site.address, deployment="facility-site-a", hostname=site.address, local=False)
    remote = str(site.home / "moved")

    def outage() -> None:
        daemons.stop(site, "sshd")
        time.sleep(5)
        daemons.start(site, "sshd")

    async def move() -> None:
        try:
            if way == "pull":
                await connector.copy_local_to_remote(str(source), remote, [location])
            breaking = threading.Timer(2.0, outage)
            breaking.start()
            if way == "push":
                await connector.copy_local_to_remote(str(source), remote, [location])
            else:
                await connector.copy_remote_to_local(remote, str(tmp_path / "back"), location)
            await asyncio.to_thread(breaking.join)
        finally:
            await connector.undeploy(False)

    try:
        asyncio.run(move())
        arrived = Path(remote) if way == "push" else tmp_path / "back"
        assert (arrived / "model.safetensors").read_bytes() == content
        assert (arrived / "config.json").read_text() == "{}"
    finally:
        link.apply(site, link.Shape())
        ssh(testbed, site, f"rm -rf {remote}")
