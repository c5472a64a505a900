"""`ssh: system` against a real sshd: everything goes over the one connection that the user has opened."""

from __future__ import annotations

import asyncio
import getpass
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from streamflow.core.deployment import ExecutionLocation
from streamflow.core.exception import WorkflowExecutionException

from coordinator.config.deployments import streamflow_deployments
from coordinator.engine.queues import Queue
from coordinator.events.event import VARIABLE
from coordinator.events.follow import EventFile
from coordinator.streamflow_plugin.lanes import KEPT_BYTES
from coordinator.streamflow_plugin.system_ssh import Session, SystemSSHConnector
from facility.exchange.errors import ConfigurationError, TransientError
from tests.deployments import read_deployment
from tests.streamflow_plugin.local_sshd import SSHD, Site

pytestmark = pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd here")
SECONDS = 200


@pytest.fixture
def host(site: Site) -> Iterator[str]:
    """A host of ~/.ssh/config whose connections are shared, as a user sets it up for a second factor."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="crossfed-test-") as short:  # a socket's name is, too
        (site.folder / ".ssh" / "config").write_text(
            f"Host centre\n  HostName 127.0.0.1\n  Port {site.port}\n  User {getpass.getuser()}\n"
            f"  IdentityFile {site.key}\n  ControlMaster auto\n  ControlPath {short}/shared\n  ControlPersist no\n"
        )
        yield "centre"


def ssh(site: Site, *words: str) -> subprocess.CompletedProcess[str]:
    config = str(site.folder / ".ssh" / "config")
    known = f"UserKnownHostsFile={site.folder}/.ssh/known_hosts"
    line = ["ssh", "-F", config, "-o", known, *words]
    return subprocess.run(line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def open_connection(site: Site) -> None:
    """Log in as the person does; then the certificate ends."""
    site.sign("-1m:+1h")
    assert ssh(site, "-MNf", "centre").returncode == 0
    site.sign("-2m:-1m")


def connector(host: str, **settings) -> tuple[SystemSSHConnector, ExecutionLocation]:
    one = SystemSSHConnector("facility-a-ssh", "/", nodes=[host], retries=2, retryDelay=1, **settings)
    return one, ExecutionLocation(name=host, deployment="facility-a-ssh", hostname=host, local=False)


def logins(site: Site) -> int:
    return (site.folder / "sshd.log").read_text().count("Accepted publickey")


def test_commands_and_transfers_are_sessions_of_the_one_connection(site, host, tmp_path):
    model, there, back = tmp_path / "model", tmp_path / "there", tmp_path / "back"
    model.mkdir()
    (model / "weights.safetensors").write_bytes(content := os.urandom(40_000_000))
    (model / "config.json").write_text("{}")
    open_connection(site)

    async def act() -> None:
        one, location = connector(host)
        try:
            assert await one.run(location, ["echo one"], capture_output=True) == ("one", 0)
            assert await one.run(location, ["sh -c 'exit 3'"], capture_output=True) == ("", 3)
            assert list(await one.get_available_locations()) == [host]
            await one.copy_local_to_remote(str(model), str(there), [location])
            await one.copy_remote_to_local(str(there), str(back), location)
        finally:
            await one.undeploy(False)

    asyncio.run(act())
    for place in (there, back):
        assert (place / "weights.safetensors").read_bytes() == content and (place / "config.json").read_text() == "{}"
    assert logins(site) == 1
    assert ssh(site, "-O", "check", "centre").returncode == 0, "the user's connection stays"
    ssh(site, "-O", "exit", "centre")


@pytest.mark.slow
def test_a_connection_that_ends_is_waited_for_and_the_next_one_goes_on(site, host, tmp_path, monkeypatch):
    events, count = EventFile(tmp_path / "events.jsonl"), tmp_path / "count"
    monkeypatch.setenv(VARIABLE, str(events.path))
    open_connection(site)

    async def act() -> None:
        one, location = connector(host)
        try:
            assert await one.run(location, ["echo one"], capture_output=True) == ("one", 0)
            ssh(site, "-O", "exit", "centre")
            await asyncio.sleep(0.5)
            waiting = asyncio.create_task(one.run(location, [f"echo ran >> {count}; echo two"], capture_output=True))
            assert not (await asyncio.wait([waiting], timeout=3.0))[0]
            began = time.monotonic()
            await asyncio.to_thread(open_connection, site)
            assert await asyncio.wait_for(waiting, SECONDS) == ("two", 0)
            assert time.monotonic() - began < SECONDS / 2, "the socket's appearance ends the pause"
        finally:
            await one.undeploy(False)

    asyncio.run(act())
    ssh(site, "-O", "exit", "centre")
    assert count.read_text() == "ran\n"
    assert [event.kind for event in events.new()] == ["login_refused", "login_works"]


def test_who_only_looks_does_not_wait_and_a_wrong_host_key_is_an_error(site, host, tmp_path):
    site.sign("-2m:-1m")

    async def look() -> None:
        one, location = connector(host, waits_for_login=False)
        await asyncio.wait_for(one.run(location, ["true"], capture_output=True), SECONDS)

    with pytest.raises(WorkflowExecutionException, match="refuses the login"):
        asyncio.run(look())
    queue = Queue(facility="a", kind="ssh", job_name="j", ssh={"nodes": [host]}, directory=tmp_path, system=True)
    with pytest.raises(TransientError, match="refuses the login"):
        queue.jobs()
    (site.folder / ".ssh" / "known_hosts").write_text("")
    with pytest.raises(WorkflowExecutionException, match="host key"):
        asyncio.run(look())


def test_a_login_node_on_which_nothing_ends_is_one_that_is_away(tmp_path, monkeypatch):
    """Its file system hangs: it takes the login, and no shell begins. Nobody waits for it without end."""
    begun, program = tmp_path / "begun", tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncase \"$1\" in -G) exit ;; esac\necho $$ >> '{begun}'\nexec sleep 1000\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("coordinator.streamflow_plugin.system_ssh.TRY_SECONDS", 0.5)

    async def look() -> None:
        one, location = connector("centre")
        await asyncio.wait_for(one.run(location, ["true"], capture_output=True), SECONDS)

    with pytest.raises(WorkflowExecutionException, match="cannot be reached, tried 2 times"):
        asyncio.run(look())
    processes = begun.read_text().split() if begun.exists() else []
    assert not any(Path("/proc", one).exists() for one in processes), "none is left behind"


def test_the_setting_chooses_the_connector_and_refuses_what_it_cannot_do():
    described = {"type": "slurm", "host": "centre", "workdir": "/w", "template": "slurm", "ssh": "system"}
    entries, _ = streamflow_deployments(
        read_deployment(described, "d"), federation="f", facility="a", template="jobs/a.sh", workdir="w"
    )
    assert entries["facility-a-ssh"]["type"] == "system-ssh"
    for wrong in ({"passphrase_file": "p"}, {"gate": True, "template": ""}, {"host": ""}, {"ssh": "mine"}):
        with pytest.raises(ConfigurationError):
            read_deployment(described | wrong, "d")


@pytest.mark.parametrize("site", ["MaxSessions 2"], indirect=True)
def test_a_shared_connection_with_few_sessions_is_given_no_more(site, host, tmp_path, monkeypatch):
    """The first commands meet it, and it is told once; soon no more run at once than there is room for."""
    events = EventFile(tmp_path / "events.jsonl")
    monkeypatch.setenv(VARIABLE, str(events.path))
    open_connection(site)

    async def act() -> None:
        one, location = connector(host)
        try:
            lost = 0
            for _ in range(4):
                ends = await asyncio.gather(*(one.end_of(location, "sleep 1; echo in", 100, 20) for _ in range(4)))
                if ends == [("in", 0)] * 4:
                    break
                lost += [code for _, code in ends].count(None)
            assert 0 < lost <= 4 and ends == [("in", 0)] * 4, "each that is lost leaves fewer at once"
        finally:
            await one.undeploy(False)

    asyncio.run(act())
    told = [event["text"] for event in events.new() if event.kind == "problem"]
    assert len([text for text in told if "fewer sessions than `sessions:`" in text]) == 1
    ssh(site, "-O", "exit", "centre")


def test_of_what_a_session_prints_that_nobody_reads_the_end_is_kept():
    async def act() -> bytes:
        words = ["head", "-c", "3000000", "/dev/zero"]
        process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        return (await Session(process, None).wait()).stdout

    assert asyncio.run(act()) == bytes(KEPT_BYTES)
