"""A login of StreamFlow's ssh connector, or of ours, to a host of this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import asyncssh
from streamflow.deployment.connector.ssh import SSHConfig, SSHContext


async def logged_in(
    kind: type[SSHContext], server: asyncssh.SSHAcceptor, *, keys: Sequence[Path] = (), check_host_key: bool = False
) -> asyncssh.SSHClientConnection:
    """The connection that `kind` makes to the host. Raises what asyncssh does."""
    config = SSHConfig(
        check_host_key=check_host_key,
        client_keys=[str(key) for key in keys],
        connect_timeout=10,
        hostname=f"127.0.0.1:{server.get_port()}",
        password_file=None,
        ssh_key_passphrase_file=None,
        tunnel=None,
        username="me",
    )
    context = object.__new__(kind)
    context._streamflow_config_dir = ""
    connection = await context._get_connection(config)
    assert connection is not None
    return connection
