"""The user's ssh-agent, tickets, display and ports stay here: no login to a facility lends them, whatever ~/.ssh/config
says."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from pathlib import Path

import asyncssh
import pytest
from streamflow.deployment.connector.ssh import SSHContext

from coordinator.preflight.remote import run_there
from coordinator.streamflow_plugin import swift, system_ssh
from coordinator.streamflow_plugin.openssh import Login, openssh_command
from coordinator.streamflow_plugin.ssh import CarefulContext
from tests.deployments import read_deployment
from tests.ports import free_port
from tests.streamflow_plugin.local_sshd import SSHD, Site
from tests.streamflow_plugin.logins import logged_in
from tests.streamflow_plugin.test_ssh_settings import LOGIN, configured


class Anybody(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        return False


def answer(process: asyncssh.SSHServerProcess) -> None:
    process.stdout.write(f"agent: {process.channel.get_agent_path()}")
    process.exit(0)


async def agent_at_the_facility(kind: type[SSHContext], *, check_host_key: bool = False) -> str:
    """What a facility's process sees of the agent when `kind` logs in to a host whose key nobody knows."""
    key = asyncssh.generate_private_key("ssh-ed25519")
    async with await asyncssh.listen(
        "127.0.0.1", 0, server_factory=Anybody, server_host_keys=[key], process_factory=answer, agent_forwarding=True
    ) as server:
        async with await logged_in(kind, server, check_host_key=check_host_key) as connection:
            return str((await connection.run("x")).stdout)


def test_no_agent_reaches_a_facility(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host *\n  ForwardAgent yes\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    assert asyncio.run(agent_at_the_facility(SSHContext)) != "agent: None"
    assert asyncio.run(agent_at_the_facility(CarefulContext)) == "agent: None"


@pytest.mark.parametrize("line", ["", "UserKnownHostsFile none", "UserKnownHostsFile /dev/null"])
def test_a_host_key_is_checked_whatever_file_of_known_hosts_the_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
):
    """For asyncssh `none` is not to check; whoever sits in between would be taken for the facility."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(f"Host *\n  {line}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(asyncssh.HostKeyNotVerifiable):
        asyncio.run(agent_at_the_facility(CarefulContext, check_host_key=True))


def test_the_systems_ssh_checks_the_key_of_this_machine_too():
    """Another user can listen at the port of a tunnel that has ended."""
    words = openssh_command(Login(host="h", jump=Login(host="j")), connect_seconds=1)
    assert "NoHostAuthenticationForLocalhost=no" in words
    proxy = next(word for word in words if word.startswith("ProxyCommand="))
    assert proxy.count("NoHostAuthenticationForLocalhost=no") == 1


LENDS = """
Host *
  ForwardAgent yes
  ForwardX11 yes
  GSSAPIDelegateCredentials yes
  RemoteForward {port} 127.0.0.1:22
  LocalForward {port} 127.0.0.1:22
  DynamicForward {port}
  Tunnel yes
  PermitLocalCommand yes
  LocalCommand touch ran
  RemoteCommand id
  RequestTTY force
"""
"""What a person may have for work at a login node."""


def test_no_part_of_the_users_configuration_lends_a_facility_anything_of_this_machine(tmp_path: Path):
    """By each of the commands that reach one: of check and set-up, of a run, and of its transfers."""
    (config := tmp_path / "config").write_text(LENDS.format(port=4711))
    for options in ((), system_ssh.OPTIONS, swift.OPTIONS):
        ssh, *words = openssh_command(Login(host="h", jump=Login(host="j")), connect_seconds=1, options=options)
        proxy = next(word for word in words if word.startswith("ProxyCommand=")).removeprefix("ProxyCommand=")
        proxy = proxy.replace("%h:%p", "h:22")
        for line in (words, shlex.split(proxy)[1:]):
            asked = subprocess.run([ssh, "-F", config, "-G", *line], capture_output=True, text=True, check=True).stdout
            said = dict(found.split(" ", 1) for found in asked.splitlines())
            for key in ("forwardagent", "forwardx11", "gssapidelegatecredentials", "permitlocalcommand"):
                assert said[key] == "no", key
            assert said["tunnel"] == said["requesttty"] == "false"
            assert not {"remoteforward", "localforward", "dynamicforward", "remotecommand"} & set(said)


@pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd here")
def test_no_port_of_this_machine_is_opened_at_a_facility_that_is_checked(site: Site):
    port = free_port()
    configured(site, LENDS.format(port=port) + "  HostName 127.0.0.1\n" + LOGIN)
    deployment = read_deployment({"type": "ssh", "host": "centre", "workdir": "/w"}, "d")
    answer = run_there(deployment, f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>&1; echo display: $DISPLAY\n")
    assert "refused" in answer.out and answer.out.endswith("\ndisplay:\n")
    assert not Path("ran").exists()


@pytest.mark.parametrize("kind", [SSHContext, CarefulContext])
def test_no_ticket_of_the_users_is_a_facilitys_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[SSHContext]
):
    """asyncssh reads ~/.ssh/config for what it is not told; it asks for a ticket where the site's library is there."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host *\n  GSSAPIDelegateCredentials yes\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    lent: list[bool] = []
    prepare = asyncssh.SSHClientConnectionOptions.prepare

    def prepared(self, *arguments, **options):
        prepare(self, *arguments, **options)
        lent.append(self.gss_delegate_creds)

    monkeypatch.setattr(asyncssh.SSHClientConnectionOptions, "prepare", prepared)
    asyncio.run(agent_at_the_facility(kind))
    assert lent and all(lent) is (kind is SSHContext)


def test_the_systems_ssh_forwards_none_either():
    words = openssh_command(Login(host="h", jump=Login(host="j")), connect_seconds=1)
    assert "ForwardAgent=no" in words
    assert next(word for word in words if word.startswith("ProxyCommand=")).count("ForwardAgent=no") == 1
