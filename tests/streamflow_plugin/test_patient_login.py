"""A real sshd that takes certificates only: one that has ended is waited for, and a new one goes on where it was."""

from __future__ import annotations

import asyncio
import getpass
from pathlib import Path

import pytest
from streamflow.core.deployment import ExecutionLocation
from streamflow.core.exception import WorkflowExecutionException

from coordinator.engine.progress import Progress
from coordinator.events.event import VARIABLE, Event
from coordinator.events.follow import EventFile
from coordinator.preflight.remote import run_there
from coordinator.streamflow_plugin import patient_login
from coordinator.streamflow_plugin.ssh import ParallelSSHConnector
from tests.deployments import read_deployment
from tests.streamflow_plugin.local_sshd import SSHD, Site

pytestmark = pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd here")


def connector(site: Site, **settings) -> tuple[ParallelSSHConnector, ExecutionLocation]:
    host = f"127.0.0.1:{site.port}"
    one = ParallelSSHConnector(
        "facility-a-ssh",
        "/",
        nodes=[host],
        username=getpass.getuser(),
        sshKey=str(site.key),
        retries=2,
        retryDelay=1,
        **settings,
    )
    return one, ExecutionLocation(name=host, deployment="facility-a-ssh", hostname=host, local=False)


def test_an_expired_certificate_is_waited_for_and_a_new_one_goes_on(site, tmp_path, monkeypatch):
    """Longer than `retries` allow; a command and a transfer that began meanwhile both end well, once."""
    events = EventFile(tmp_path / "events.jsonl")
    monkeypatch.setenv(VARIABLE, str(events.path))
    monkeypatch.setattr(patient_login.PatientLogin, "__init__", _quick(patient_login.PatientLogin.__init__))
    model, there, count = tmp_path / "model", tmp_path / "there", tmp_path / "count"
    model.write_bytes(bytes(range(256)) * 4000)
    site.sign("-1m:+1h")

    async def act() -> None:
        one, location = connector(site)
        try:
            assert await one.run(location, ["echo one"], capture_output=True) == ("one", 0)
            site.sign("-2m:-1m")
            await one.undeploy(False)  # the connection is lost after the certificate has ended
            one.ssh_context_factories.clear()
            waiting = [
                asyncio.create_task(one.run(location, [f"echo ran >> {count}; echo two"], capture_output=True)),
                asyncio.create_task(one.copy_local_to_remote(str(model), str(there), [location])),
            ]
            done, _ = await asyncio.wait(waiting, timeout=3.0)
            assert not done and not count.exists() and not there.exists()
            site.sign("-1m:+1h")
            answer, _ = await asyncio.wait_for(asyncio.gather(*waiting), 200)
            assert answer == ("two", 0)
        finally:
            await one.undeploy(False)

    asyncio.run(act())
    assert count.read_text() == "ran\n" and there.read_bytes() == model.read_bytes()
    found = list(events.new())
    assert [event.kind for event in found] == ["login_refused", "login_works", "moved"]
    assert {event["facility"] for event in found} == {"a"}


def _quick(original, seconds: float = 0.3):
    def init(self, **fields) -> None:
        original(self, **fields | {"pause_seconds": seconds})

    return init


@pytest.mark.parametrize("how", ["certificate", "word"])
def test_a_renewal_that_can_be_seen_here_ends_the_pause(site, tmp_path, monkeypatch, how):
    """The pause is ten minutes; a new certificate, or the word of `crossfed login`, is noticed in about a second."""
    monkeypatch.setenv("CROSSFED_LOGINS", str(tmp_path / "logins"))
    (tmp_path / "logins").mkdir()
    monkeypatch.setattr(patient_login.PatientLogin, "__init__", _quick(patient_login.PatientLogin.__init__, 600.0))
    site.sign("-2m:-1m")

    async def act() -> None:
        one, location = connector(site)
        one._login.files = one._login.files if how == "certificate" else []
        try:
            waiting = asyncio.create_task(one.run(location, ["echo in"], capture_output=True))
            assert not (await asyncio.wait([waiting], timeout=2.0))[0]
            site.sign("-1m:+1h")
            if how == "word":
                (tmp_path / "logins" / "a").touch()
            assert await asyncio.wait_for(waiting, 200) == ("in", 0)
        finally:
            await one.undeploy(False)

    asyncio.run(act())


def test_who_only_looks_at_a_queue_does_not_wait(site):
    site.sign("-2m:-1m")

    async def act() -> None:
        one, location = connector(site, waits_for_login=False)
        try:
            with pytest.raises(WorkflowExecutionException, match="refuses the login"):
                await asyncio.wait_for(one.run(location, ["true"], capture_output=True), 200)
            site.sign("-1m:+1h")
            assert await one.run(location, ["echo", "in"], capture_output=True) == ("in", 0)
        finally:
            await one.undeploy(False)

    asyncio.run(act())
    tries = (site.folder / "sshd.log").read_text().count("Connection closed by authenticating user")
    assert tries == 1, "a second would count as an attack sooner"


def test_login_runs_the_sites_command_and_then_tries(site, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from coordinator.cli import app

    site.sign("-2m:-1m")
    script = tmp_path / "renew"
    script.write_text(
        f'#!/bin/sh\nexec ssh-keygen -q -s {tmp_path}/authority -I me -n {getpass.getuser()} -V "$1" {site.key}.pub\n'
    )
    script.chmod(0o700)
    described = {"type": "ssh", "host": f"127.0.0.1:{site.port}", "user": getpass.getuser(), "workdir": str(tmp_path)}
    described |= {"key": str(site.key)}
    file = tmp_path / "federation.yml"

    def write(**deployment) -> None:
        import yaml

        one = {"name": "a", "dataset": str(tmp_path), "deployment": described | deployment}
        file.write_text(yaml.safe_dump({"name": "f", "rounds": 1, "model": "m", "facilities": [one]}))

    write()
    result = CliRunner().invoke(app, ["login", "a", "-f", str(file)])
    assert result.exit_code == 1 and "does not accept our key" in result.output, result.output
    write(renew=f"{script} -1m:+5m;")  # no shell: the semicolon is the command's own
    assert CliRunner().invoke(app, ["login", "a", "-f", str(file)]).exit_code == 1
    write(renew=f"{script} -1m:+5m")
    result = CliRunner().invoke(app, ["login", "a", "-f", str(file)])
    assert result.exit_code == 0 and "lets us in" in result.output, result.output
    assert run_there(read_deployment(described, "d"), "echo in\n").out.strip() == "in"


def test_a_host_that_is_away_is_told_by_its_facilitys_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An address says nothing to an operator of twelve facilities. Once, and once that it is back."""
    events = EventFile(tmp_path / "events.jsonl")
    monkeypatch.setenv(VARIABLE, str(events.path))
    login = patient_login.PatientLogin(facility="lumi")
    for _ in range(2):
        login.report_unreachable("10.0.0.2", TimeoutError("timed out"))
    for _ in range(2):
        login.report_reached()
    away, back = map(Progress(["lumi"], 2).feed, events.new())
    assert away and away.startswith("lumi does not answer: 10.0.0.2: timed out; ") and back == "lumi answers again"


def test_the_state_before_comes_back_and_the_sentence_says_what_to_do():
    progress = Progress(["a"], 2)
    progress.feed(Event(kind="submitted", fields={"step": "/rounds/train_a", "job": "7"}))
    refused = {"facility": "a", "host": "login.a", "reason": "Permission denied"}
    said = progress.feed(Event(kind="login_refused", fields=refused))
    assert progress.states["a"] == "waiting for login" and said is not None and "`crossfed login a`" in said
    progress.feed(Event(kind="login_works", fields={"facility": "a", "host": "login.a"}))
    assert progress.states["a"] == "queued as job 7"
