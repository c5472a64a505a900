"""One ssh connection of a deployment, as StreamFlow's connector uses it."""

from __future__ import annotations

import os
from typing import Any

import asyncssh
from streamflow.core.exception import WorkflowExecutionException
from streamflow.deployment.connector.ssh import SSHConfig, SSHContext, get_param_from_file

from coordinator.events.event import emit
from coordinator.streamflow_plugin.key_file import read_key_file
from coordinator.streamflow_plugin.openssh import parse_address, shown_owner
from coordinator.streamflow_plugin.patient_login import REFUSED, PatientLogin
from coordinator.streamflow_plugin.ssh_settings import jump_of, read_ssh_settings
from facility.exchange.core_dumps import leave_no_core

CIPHERS = ["aes128-gcm@openssh.com", "aes256-ctr", "aes192-ctr", "aes128-ctr"]
"""Ciphers that StreamFlow asks for, in its order."""
ALIVE_SECONDS = 30.0
"""Between two questions whether a connection that carries nothing still lives: firewalls forget those that are idle
for some minutes, and inform neither side."""
ALIVE_COUNT = 20
"""Questions without an answer after which it is given up: ten minutes, so that a login node may hang for a while."""


class WrongHostKey(asyncssh.HostKeyNotVerifiable):
    """A host shows a key that is not known for it; `owner`: its name in known_hosts, perhaps a jump host's."""

    def __init__(self, owner: str, reason: str) -> None:
        super().__init__(reason)
        self.owner = owner


class CarefulContext(SSHContext):
    """A connection that waits for a refused login, and is not tried again after a wrong host key."""

    def __init__(self, *args: Any, login: PatientLogin | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._login = login

    async def _get_connection(self, config: SSHConfig | None) -> asyncssh.SSHClientConnection | None:
        """As the original, but for what it does not pass on: addresses of IPv6, questions whether the other side still
        lives, the user's ssh-agent and tickets out of a facility's reach whatever ~/.ssh/config says, and a connection
        to the jump host that ends with the one through it. What the federation leaves out, user, port, key or jump
        host, is what ~/.ssh/config says, as for ssh itself."""
        if config is None:
            return None
        if config.ssh_key_passphrase_file or config.password_file:
            leave_no_core()
        host, port = parse_address(config.hostname)
        said = read_ssh_settings(config.hostname, config.username or "")
        tunnel = await self._get_connection(config.tunnel or jump_of(config, said.jumps))
        try:
            connection = await asyncssh.connect(
                host,
                port=port or (),
                tunnel=tunnel,
                username=config.username or (),
                client_keys=config.client_keys or said.keys,
                agent_identities=_in_agent(config),
                ignore_encrypted=not config.client_keys or _agent_may_hold(config),
                passphrase=get_param_from_file(config.ssh_key_passphrase_file, self._streamflow_config_dir),
                password=get_param_from_file(config.password_file, self._streamflow_config_dir),
                known_hosts=said.known_hosts if config.check_host_key else None,
                agent_forwarding=False,
                gss_delegate_creds=False,
                compression_algs=None,
                encryption_algs=CIPHERS,
                connect_timeout=config.connect_timeout,
            )
        except BaseException as error:
            if tunnel is not None:
                tunnel.close()
            if isinstance(error, asyncssh.HostKeyNotVerifiable):
                raise WrongHostKey(said.known_as, str(error)) from error
            raise
        if tunnel is not None:
            connection.set_tunnel(tunnel)
        if not connection._keepalive_interval:  # ServerAliveInterval of ~/.ssh/config comes first
            connection.set_keepalive(ALIVE_SECONDS, ALIVE_COUNT)
        return connection

    async def get_connection(self) -> asyncssh.SSHClientConnection:
        if self._login is None:
            return await self._connect()
        return await self._login.through(self.get_hostname(), self._connect)

    async def _connect(self) -> asyncssh.SSHClientConnection:
        """Raises `ConnectionError`, `TimeoutError` or an error of asyncssh for what may be tried again: the original
        knows no name that does not resolve just now, and no network that is away."""
        try:
            connection = await super().get_connection()
            if self._login is not None:
                self._login.report_reached()
            return connection
        except WrongHostKey as error:
            await self._forget()
            emit("host_key", host=self.get_hostname(), owner=error.owner, reason=str(error))
            whose = shown_owner(self.get_hostname(), error.owner)
            raise WorkflowExecutionException(
                f"the host key of {whose} is not the one in known_hosts: {error}"
            ) from error
        except REFUSED as error:
            await self._forget()
            if self._login is not None:
                raise
            raise WorkflowExecutionException(f"{self.get_hostname()} refuses the login: {error}") from error
        except (OSError, asyncssh.Error) as error:
            await self._forget()
            if self._login is not None:
                self._login.report_unreachable(self.get_hostname(), error)
            if isinstance(error, ConnectionError | TimeoutError | asyncssh.Error):
                raise
            raise ConnectionError(str(error)) from error
        except BaseException:
            await self._forget()
            raise

    async def _forget(self) -> None:
        """Let the next use connect anew, where the original would say for ever that it cannot."""
        await self.close()
        self._connect_event.clear()


def _in_agent(config: SSHConfig) -> list[bytes] | tuple[()]:
    """The only keys that ssh-agent may offer: where the federation names one, that one and its certificate, as for ssh
    itself. Another one that the host takes could open a shell where `key:` opens a gate."""
    return [one for key in config.client_keys for one in read_key_file(key).identities] or ()


def _agent_may_hold(config: SSHConfig) -> bool:
    """Whether a key that cannot be read without its passphrase is left to ssh-agent."""
    return bool(os.environ.get("SSH_AUTH_SOCK")) and not config.ssh_key_passphrase_file
