"""Logins and queues: certificate, jump host, data-transfer host, no queue at all, and stuck jobs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from streamflow.core.deployment import ExecutionLocation

from coordinator.config.federation import read_federation
from coordinator.engine.queues import read_queues
from coordinator.engine.render import write_rendered
from coordinator.preflight.remote import run_there
from coordinator.streamflow_plugin.lanes import FEWEST
from coordinator.streamflow_plugin.ssh import ParallelSSHConnector
from coordinator.testbed import namespaces
from coordinator.testbed.command import call, wait_until
from coordinator.testbed.layout import Site
from tests.deployments import read_deployment
from tests.testbed.authority import Authority, CertificateDaemon
from tests.testbed.conftest import ssh
from tests.testbed.federation import federate
from tests.testbed.gates import behind_gates, gated_sites

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(300)]
PORT = 2222


@dataclass(frozen=True, kw_only=True)
class Second:
    """A second sshd of site-a, which takes certificates only."""

    site: Site
    address: str
    key: Path
    log: Path


@pytest.fixture(scope="module")
def second(testbed, tmp_path_factory) -> Iterator[Second]:
    authority = Authority(folder=tmp_path_factory.mktemp("keys"))
    authority.make()
    daemon = CertificateDaemon(site=testbed.sites[0], port=PORT)
    key = authority.key("id_ed25519")
    authority.sign(key, daemon.site.user, "+1h")
    known = testbed.known_hosts.read_text()
    daemon.start(authority)
    testbed.known_hosts.write_text(known + daemon.known_host(testbed))
    try:
        yield Second(site=daemon.site, address=daemon.address, key=key, log=daemon.log)
    finally:
        testbed.known_hosts.write_text(known)
        daemon.stop()


def connected(second: Second, command: str, *, move: Path | None = None, **settings) -> str:
    """What a command says over our connector; with `move`, this file travels there and back too."""
    connector = ParallelSSHConnector(
        "facility-site-a", "/", username=second.site.user, retries=2, retryDelay=1, **settings
    )
    host = next(iter(connector.nodes))
    location = ExecutionLocation(name=host, deployment="facility-site-a", hostname=host, local=False)

    async def act() -> str:
        try:
            answer = await connector.run(location=location, command=[command], capture_output=True)
            if move is not None:
                await connector.copy_local_to_remote(str(move), f"{second.site.home}/moved", [location])
                await connector.copy_remote_to_local(f"{second.site.home}/moved", str(move) + ".back", location)
            assert answer is not None and answer[1] == 0
            return answer[0]
        finally:
            await connector.undeploy(False)

    return asyncio.run(act())


def test_a_certificate_lets_in_and_the_bare_key_does_not(second):
    assert connected(second, "id -un", nodes=[second.address], sshKey=str(second.key)) == second.site.user
    deployment = read_deployment(
        {"type": "ssh", "host": second.address, "user": second.site.user, "key": str(second.key), "workdir": "/w"}, "d"
    )
    assert run_there(deployment, "id -un\n").out.strip() == second.site.user
    bare = second.key.with_name("bare")
    shutil.copy(second.key, bare)
    with pytest.raises(Exception, match="refuses the login"):
        connected(second, "id -un", nodes=[second.address], sshKey=str(bare), waits_for_login=False)


def test_check_asks_in_the_environment_in_which_the_run_s_commands_are(second, testbed):
    """Sites set PATH and directories in profiles, which only login shells read."""
    profile = second.site.home / ".profile"
    before, script = profile.read_text(), 'id -un; pwd; umask; echo "$PATH" "$TMPDIR" "$SLURM_CONF"; command -v sbatch'
    profile.write_text(before + "export TMPDIR=~/scratch PATH=$PATH:/site/programs\n")
    described = {
        "type": "ssh",
        "host": second.address,
        "user": second.site.user,
        "key": str(second.key),
        "workdir": "/w",
    }
    try:
        asked = run_there(read_deployment(described, "d"), script + "\n").out.strip()
        assert connected(second, script, nodes=[second.address], sshKey=str(second.key)) == asked
    finally:
        profile.write_text(before)
    assert "/site/programs" in asked and f"{second.site.home}/scratch" in asked and asked.endswith("/sbatch"), asked


def test_a_jump_host_is_gone_through(second, testbed):
    """The facility then sees the jump host's address, not the coordinator's."""
    jump = {"hostname": second.site.address, "username": second.site.user, "sshKey": str(testbed.key)}
    direct = connected(second, "echo $SSH_CONNECTION", nodes=[second.address], sshKey=str(second.key))
    through = connected(second, "echo $SSH_CONNECTION", nodes=[second.address], sshKey=str(second.key), tunnel=jump)
    assert direct.split()[0] == second.site.coordinator_address and through.split()[0] == second.site.address
    described = {
        "type": "ssh",
        "host": second.address,
        "user": second.site.user,
        "key": str(second.key),
        "workdir": "/w",
        "tunnel": {"host": second.site.address, "user": second.site.user, "key": str(testbed.key)},
    }
    answer = run_there(read_deployment(described, "d"), "echo $SSH_CONNECTION\n")
    assert answer.out.split()[0] == second.site.address, answer.error


def test_a_large_file_goes_over_the_systems_ssh_and_leaves_no_connection(second, tmp_path):
    path, before = tmp_path / "model.safetensors", second.log.read_text().count("Accepted publickey")
    path.write_bytes(content := os.urandom(48_000_000))
    connected(second, "true", move=path, nodes=[second.address], sshKey=str(second.key))
    assert Path(f"{path}.back").read_bytes() == content
    logins = second.log.read_text().count("Accepted publickey") - before
    assert logins >= 2 + 2 * FEWEST, "one for commands, one to find out the distance, and some for each way"
    ours = [f"{second.address.split(':')[0]}", "ControlPath="]
    wait_until(
        lambda: not any(all(word in line for word in ours) for line in call("ps", "-eo", "args").stdout.splitlines()),
        10,
        "end of ssh",
    )
    left = call("ps", "-u", second.site.user, "-o", "args=", check=False).stdout.splitlines()
    assert not [line for line in left if "cat" in line or "dd " in line], left


def test_models_go_over_the_data_transfer_host_and_commands_to_the_login_node(second, testbed, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x" * 9_000_000)
    before = second.log.read_text().count("Accepted publickey")
    transfer = {"hostname": second.address, "username": second.site.user, "sshKey": str(second.key)}
    said = connected(
        second,
        "echo $SSH_CONNECTION",
        move=file,
        nodes=[second.site.address],
        sshKey=str(testbed.key),
        dataTransferConnection=transfer,
    )
    assert said.split()[3] == "22"
    assert second.log.read_text().count("Accepted publickey") > before
    assert Path(str(file) + ".back").read_bytes() == file.read_bytes()


def test_a_held_job_costs_its_facility_the_round_and_the_user_is_told(testbed, material, tmp_path):
    a, b = testbed.sites
    run = federate(testbed, tmp_path, *material, name="held", rounds=1)
    gate = a.home / "gate-held" / "job.sh"
    job = gate if a.name in gated_sites() else run.file.parent / "jobs" / f"{a.name}.sh"
    job.write_text(job.read_text().replace("#SBATCH --nodes=1", "#SBATCH --nodes=1\n#SBATCH --hold"))
    supervisor = run.supervisor(look_seconds=1.0)
    supervisor.queues = read_queues(run.file.parent / "streamflow.yml", {a.name: 4.0, b.name: 4.0})
    assert supervisor.run()[0] == 0, run.text()
    assert any("JobHeldUser" in line and "scontrol release" in line for line in run.said), run.text()
    assert any("goes on without it" in line for line in run.said)
    assert any(f"round 0 goes on without {a.name}" in line for line in run.log), run.text()
    assert len(run.archive.rounds()) == 1


@pytest.mark.slow
def test_a_job_that_waits_for_longer_than_the_federation_allows_is_its_facilitys_absence(testbed, material, tmp_path):
    a, b = testbed.sites
    run = federate(
        testbed, tmp_path, *material, name="overdue", rounds={"count": 1, "longest_queue_hours": 0.01}, minimum=1
    )
    call(*namespaces.enter(b, "scontrol", "update", "PartitionName=main", "State=DOWN"))
    try:
        assert run.run() == 0, run.text()
    finally:
        call(*namespaces.enter(b, "scontrol", "update", "PartitionName=main", "State=UP"))
    rows = {row.facility: row for row in run.archive.history()[0].facilities}
    assert rows[a.name].status == "ok" and rows[b.name].status != "ok", run.text()
    assert "still waits" in rows[b.name].reason and "longest_queue_hours is 0.01" in rows[b.name].reason, rows
    assert ssh(testbed, b, "squeue -h").stdout == "", "it was cancelled"


def test_a_partition_that_is_down_is_told(testbed, material, tmp_path):
    a = testbed.sites[0]
    run = federate(testbed, tmp_path, *material, name="down", rounds=1)
    queue = next(q for q in read_queues(run.file.parent / "streamflow.yml") if q.facility == a.name)
    call(*namespaces.enter(a, "scontrol", "update", "PartitionName=main", "State=DOWN"))
    try:
        assert ssh(testbed, a, f"sbatch --job-name={queue.job_name} --wrap 'sleep 60'").returncode == 0
        wait_until(lambda: bool(queue.jobs() and queue.jobs()[0].reason), 30, "a reason")
        assert "partition takes no jobs" in queue.scheduler.what_to_do(queue.jobs()[0]), queue.jobs()
        assert len(queue.cancel(waiting_only=True)) == 1
        wait_until(lambda: not queue.jobs(), 30, "the job's end")
    finally:
        call(*namespaces.enter(a, "scontrol", "update", "PartitionName=main", "State=UP"))


TEMPLATE = """#!/bin/bash
if [ -e ~/slow ]; then sleep 300; fi
. '<home>/env.sh'
IFS= read -r -d '' command <<'CROSSFED' || true
{{ streamflow_command }}
CROSSFED
bash -c "$command"
"""


def test_stopping_ends_a_job_without_queue_and_the_next_run_trains_once(testbed, material, tmp_path):
    a, b = testbed.sites
    run = federate(testbed, tmp_path, *material, name="plain", rounds=1, minimum=2, gated=[])
    described = yaml.safe_load(run.file.read_text())
    (run.file.parent / "plain.sh").write_text(TEMPLATE)
    for one in described["facilities"]:
        one["deployment"] |= {"type": "ssh", "template": "plain.sh"}
        del one["deployment"]["fill"]
    run.file.write_text(yaml.safe_dump(described))
    write_rendered(read_federation(run.file))
    behind_gates(testbed, run.file, gated_sites())
    queues = read_queues(run.file.parent / "streamflow.yml")
    assert [queue.kind for queue in queues] == ["ssh", "ssh"]
    for site in (a, b):
        (site.home / "slow").touch()
    try:
        supervisor = run.supervisor()
        result: list[tuple[int, str]] = []
        thread = threading.Thread(target=lambda: result.append(supervisor.run()), daemon=True)
        thread.start()
        for queue in queues:
            wait_until(lambda queue=queue: bool(queue.jobs()), 90, f"a job at {queue.facility}")  # type: ignore[misc]
        supervisor.stop(signal.SIGTERM)
        thread.join(60)
        assert result and result[0][0] == 128 + signal.SIGTERM, run.text()
        for queue in queues:
            wait_until(lambda queue=queue: not queue.jobs(), 30, f"the end of the job at {queue.facility}")  # type: ignore[misc]
    finally:
        for site in (a, b):
            (site.home / "slow").unlink()
    assert run.run() == 0, run.text()
    assert len(run.archive.rounds()) == 1
    for site in (a, b):
        ps = subprocess.run(["ps", "-u", site.user, "-o", "args="], capture_output=True, text=True).stdout
        assert "facility." not in ps and "sleep 300" not in ps
