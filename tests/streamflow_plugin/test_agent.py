"""The user's ssh-agent stays here: no login to a facility forwards it, whatever ~/.ssh/config says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import asyncssh
import pytest
from streamflow.deployment.connector.ssh import SSHContext

from coordinator.streamflow_plugin.openssh import Login, openssh_command
from coordinator.streamflow_plugin.ssh import CarefulContext
from tests.streamflow_plugin.logins import logged_in


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


def test_the_systems_ssh_forwards_none_either():
    words = openssh_command(Login(host="h", jump=Login(host="j")), connect_seconds=1)
    assert "ForwardAgent=no" in words
    assert next(word for word in words if word.startswith("ProxyCommand=")).count("ForwardAgent=no") == 1
