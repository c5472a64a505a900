"""A run logs in where `crossfed check`, which asks ssh itself, was let in: ~/.ssh/config counts for both alike."""

from __future__ import annotations

import asyncio
import getpass
import os
import re
import subprocess
from pathlib import Path
from shutil import which

import pytest
from streamflow.core.deployment import ExecutionLocation
from streamflow.core.exception import WorkflowExecutionException

from coordinator.engine.supervise import fatal_reason
from coordinator.events.event import VARIABLE as EVENTS
from coordinator.events.follow import EventFile
from coordinator.preflight import remote
from coordinator.preflight.remote import check_connection
from coordinator.streamflow_plugin.ssh import ParallelSSHConnector
from coordinator.streamflow_plugin.ssh_settings import read_ssh_settings
from coordinator.streamflow_plugin.system_ssh import SystemSSHConnector
from facility.exchange.errors import ConfigurationError
from tests.deployments import read_deployment
from tests.streamflow_plugin.local_sshd import SSHD, Site

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd here")]

LOGIN = "  Port {port}\n  User {user}\n  IdentityFile {home}/.ssh/none\n  IdentityFile {key}\n"
CONFIGS = {
    "Port, User and IdentityFile, of which one does not exist": "Host centre\n  HostName 127.0.0.1\n" + LOGIN,
    "HostKeyAlias": "Host centre\n  HostName localhost\n  HostKeyAlias [127.0.0.1]:{port}\n" + LOGIN,
    "ProxyJump for all hosts": "Host centre jump\n  HostName 127.0.0.1\nHost jump\n  ProxyJump none\n"
    "Host *\n  ProxyJump jump\n"
    "  UserKnownHostsFile {home}/.ssh/known_hosts\n" + LOGIN,
    "Include and Match": "Include conf.d/*\nMatch originalhost centre\n  HostName 127.0.0.1\n",
}


def configured(site: Site, text: str) -> None:
    """Write ~/.ssh/config; a certificate lets in."""
    site.sign("-1m:+1h")
    folder = site.folder / ".ssh"
    words = {"port": site.port, "user": getpass.getuser(), "key": site.key, "home": site.folder}
    (folder / "conf.d").mkdir()
    (folder / "conf.d" / "one").write_text(("Host *\n" + LOGIN).format(**words))
    (folder / "config").write_text(text.format(**words))


def ran(system: bool = False) -> tuple[str, int] | None:
    """What a command at `centre` says, about which federation.yml says no more than this name."""
    kind = SystemSSHConnector if system else ParallelSSHConnector
    connector = kind("facility-a-ssh", "/", nodes=["centre"], retries=1, waits_for_login=False)
    location = ExecutionLocation(name="centre", deployment="facility-a-ssh", hostname="centre", local=False)

    async def act() -> tuple[str, int] | None:
        try:
            return await connector.run(location, ["echo here"], capture_output=True)
        finally:
            await connector.undeploy(False)

    return asyncio.run(act())


def checked() -> str:
    return check_connection("a", read_deployment({"type": "ssh", "host": "centre", "workdir": "/w"}, "d")).verdict


@pytest.mark.parametrize("name", CONFIGS)
def test_a_host_of_the_users_configuration_is_reached_by_check_and_by_the_run(site: Site, name: str):
    configured(site, CONFIGS[name])
    assert checked() == "ok"
    assert ran() == ("here", 0)
    logins = (site.folder / "sshd.log").read_text().count("Accepted publickey")
    assert logins == (4 if "ProxyJump" in name else 2), "over the jump host where one is named, once"


def test_no_file_of_known_hosts_is_no_leave_to_go_to_any_host(site: Site):
    configured(site, "Host centre\n  HostName 127.0.0.1\n  UserKnownHostsFile none\n" + LOGIN)
    with pytest.raises(Exception, match="host key"):
        ran()


def test_host_keys_that_the_machine_has_for_all_users_count(site: Site):
    known = site.folder / ".ssh" / "known_hosts"
    known.rename(site.folder / "all")
    configured(site, "Host centre\n  HostName 127.0.0.1\n  GlobalKnownHostsFile {home}/all {home}/none\n" + LOGIN)
    assert checked() == "ok"
    assert ran() == ("here", 0)


def test_a_line_that_a_run_cannot_read_fails_the_check_with_its_place(site: Site):
    configured(site, "Host centre\n  HostName 127.0.0.1\n" + LOGIN.replace("{port}", "{port} # of the gateway"))
    row = check_connection("a", read_deployment({"type": "ssh", "host": "centre", "workdir": "/w"}, "d"))
    assert row.verdict == "fail" and "line 3" in row.found and "ssh: system" in row.fix, row


def test_what_nothing_is_said_of_is_left_to_ssh(site: Site):
    found = read_ssh_settings("elsewhere")
    assert (list(found.keys), list(found.jumps)) == ([], [])
    assert found.known_hosts == [str(site.folder / ".ssh" / "known_hosts")]


def test_a_certificate_that_is_renewed_is_seen_where_only_the_configuration_names_it(site: Site):
    """A refused login is tried again as its files change, else once a minute."""
    configured(site, "Host centre\n  HostName 127.0.0.1\n" + LOGIN)
    login = ParallelSSHConnector("facility-a-ssh", "/", nodes=["centre"])._login
    assert login is not None
    before = login._renewed()
    assert any(before)
    site.sign("-1m:+2h")
    assert login._renewed() != before


WAY = (
    "Host jump\n  HostName 127.0.0.1\n  HostKeyAlias jump.site\n  ProxyJump none\n"
    "Host centre\n  HostName 127.0.0.1\n  ProxyJump jump\n  HostKeyAlias centre.site\n"
    "Host *\n  UserKnownHostsFile {home}/.ssh/known_hosts\n"
)


@pytest.mark.parametrize("config", [WAY + LOGIN, "Host centre\n  HostName 127.0.0.1\n" + LOGIN], ids=["jump", "alias"])
@pytest.mark.parametrize("system", [False, True], ids=["ssh", "ssh: system"])
def test_the_host_is_named_whose_key_has_changed(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: str, system: bool
):
    """A jump host's, too, and by the name that known_hosts has: the facility's own was named, of which `ssh-keygen -R`
    took away a sound key, or found none."""
    jumps = "ProxyJump" in config
    configured(site, config)
    known, own = site.folder / ".ssh" / "known_hosts", (site.folder / "host.pub").read_text()
    owner = "jump.site" if jumps else f"[127.0.0.1]:{site.port}"
    known.write_text(f"centre.site {own}" + (f"jump.site {own}" if jumps else f"{owner} {own}"))
    assert checked() == "ok" and ran(system) == ("here", 0)
    known.write_text(f"centre.site {own}{owner} {(site.folder / 'authority.pub').read_text()}")
    row = check_connection("a", read_deployment({"type": "ssh", "host": "centre", "workdir": "/w"}, "d"))
    assert (row.verdict, row.check) == ("fail", "host key") and f"-R '{owner}'" in row.fix, row
    assert f"{owner} (login to centre) shows another host key" in row.found
    events = EventFile(tmp_path / "events")
    monkeypatch.setenv(EVENTS, str(events.path))
    with pytest.raises(WorkflowExecutionException, match=re.escape(f"the host key of {owner} (login to centre)")):
        ran(system)
    [event] = events.new()
    events.close()
    assert f"-R '{owner}'" in fatal_reason(event)


def test_a_hosts_certificate_lets_in_until_it_has_expired_and_then_is_told_of(site: Site):
    """Of a known_hosts that has the authority alone. It was a key that known_hosts lacks, to be added by hand."""
    configured(site, "Host centre\n  HostName 127.0.0.1\n" + LOGIN)
    authority = (site.folder / "authority.pub").read_text()
    (site.folder / ".ssh" / "known_hosts").write_text(f"@cert-authority [127.0.0.1]:{site.port} {authority}")
    site.show_certificate("-1h:+1h")
    assert checked() == "ok" and ran() == ("here", 0)
    site.show_certificate("-2h:-1h")
    row = check_connection("a", read_deployment({"type": "ssh", "host": "centre", "workdir": "/w"}, "d"))
    assert row.check == "host key" and "certificate" in row.found and "expired" in row.found, row
    with pytest.raises(WorkflowExecutionException, match="Certificate expired"):
        ran()


def test_hashed_names_of_known_hosts_count(site: Site):
    configured(site, "Host centre\n  HostName 127.0.0.1\n" + LOGIN)
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", site.folder / ".ssh" / "known_hosts"], check=True)
    assert checked() == "ok" and ran() == ("here", 0)


def test_jump_hosts_that_name_each_other_fail_the_check_and_the_login(site: Site):
    """Both would be followed without end."""
    configured(
        site, "Host centre one two\n  HostName 127.0.0.1\nHost centre two\n  ProxyJump one\nHost one\n  ProxyJump two\n"
    )
    row = check_connection("a", read_deployment({"type": "ssh", "host": "centre", "workdir": "/w"}, "d"))
    assert row.verdict == "fail" and row.check == "ssh settings"
    assert "centre over one over two over one and so on" in row.found
    with pytest.raises(ConfigurationError, match="have no end"):
        ran()


def test_a_way_that_only_the_file_of_all_accounts_names_is_told_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """ssh, and so `crossfed check`, went over the jump host of /etc/ssh/ssh_config, and the run said for hours that the
    host cannot be reached. What does not decide the way is no matter; `ssh` here takes another file for that one."""
    (programs := tmp_path / "bin").mkdir()
    (every := tmp_path / "ssh_config").write_text(
        "Host leonardo\n  ProxyJump me@gate.example.org\nHost *\n  HashKnownHosts yes\n  SendEnv LANG LC_*\n"
    )
    stand_in = f'#!/bin/sh\ncase " $* " in *" -F "*) ;; *) set -- -F {every} "$@" ;; esac\nexec {which("ssh")} "$@"\n'
    (programs / "ssh").write_text(stand_in)
    (programs / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    described = {"type": "ssh", "host": "leonardo", "user": "me", "workdir": "/scratch"}
    row = check_connection("cineca", read_deployment(described, "d"))
    assert (row.verdict, row.check) == ("fail", "ssh settings"), row
    assert "`proxyjump me@gate.example.org` of leonardo" in row.found and "ssh: system" in row.fix
    for same in (described | {"host": "vega"}, described | {"ssh": "system"}, described | {"tunnel": {"host": "own"}}):
        assert remote._of_all_accounts("site", read_deployment(same, "d")) is None, same


def test_a_host_key_that_no_file_of_a_run_has_is_told_before_it(site: Site):
    """`known_hosts` of federation.yml is for checks: they passed, and the first round ended with a wrong host key."""
    configured(site, CONFIGS["Port, User and IdentityFile, of which one does not exist"])
    own, other = site.folder / ".ssh" / "known_hosts", site.folder / "facilities"
    described = {"type": "ssh", "host": "centre", "workdir": "/w", "known_hosts": str(other)}
    own.rename(other)
    row = check_connection("a", read_deployment(described, "d"))
    assert (row.verdict, row.check) == ("fail", "ssh settings") and f"UserKnownHostsFile {other}" in row.fix, row
    with pytest.raises(WorkflowExecutionException, match="not the one in known_hosts"):
        ran()
    with (site.folder / ".ssh" / "config").open("a") as config:
        config.write(f"Host centre\n  UserKnownHostsFile {other}\n")
    assert check_connection("a", read_deployment(described, "d")).verdict == "ok" and ran() == ("here", 0)
