"""What ~/.ssh/config says of a host, for a connection of asyncssh, so that a run logs in where `ssh` does.

asyncssh reads the file only for what its caller leaves out, and differs from ssh_config(5) where that would matter
here: a missing file of an `IdentityFile` is an error, host keys in /etc/ssh/ssh_known_hosts do not count, and
`UserKnownHostsFile none` turns the check of host keys off.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncssh.config import ConfigParseError, SSHClientConfig
from streamflow.deployment.connector.ssh import SSHConfig

from coordinator.streamflow_plugin.openssh import known_as, parse_address
from facility.exchange.errors import ConfigurationError

MOST_JUMPS = 8
"""Jump hosts in a row, as many as ~/.ssh/config may name, each through the next."""
USER_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
GLOBAL_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")

NO_HOSTS = b"# no host\n"
"""Content of a file that knows no host; asyncssh takes no content at all for ~/.ssh/known_hosts."""


@dataclass(frozen=True, kw_only=True)
class SSHSettings:
    """What the file says of one host; empty where it says nothing."""

    keys: Sequence[str]
    """Files of `IdentityFile` that can be read."""
    certificates: Sequence[str]
    """Files of `CertificateFile`, and those beside `keys`, whether they are there now or not."""
    jumps: Sequence[str]
    """`ProxyJump`: `user@host:port` each, the nearest first."""
    known_hosts: Sequence[str] | bytes
    """Files with host keys that can be read, or the content of one."""
    known_as: str
    """The name under which these have the host: `HostKeyAlias`, or `HostName` with the port where that is not 22."""


def read_ssh_settings(login: str, user: str = "") -> SSHSettings:
    """What ~/.ssh/config says of the host `login`, perhaps with a port, as federation.yml and `ProxyJump` name it.
    Raises `ConfigurationError` where asyncssh cannot read the file."""
    host, port = parse_address(login)
    file = Path("~/.ssh/config").expanduser()
    paths: list[Any] = [file] if os.access(file, os.R_OK) else []
    try:
        found = SSHClientConfig.load(
            None,
            paths,
            False,
            False,
            False,
            getpass.getuser(),
            user or (),
            host,
            port or (),  # type: ignore[arg-type]
        )
    except ValueError as error:
        said = str(error) if isinstance(error, ConfigParseError) else f"{file}: {error}"
        raise ConfigurationError(
            f"a run, which reads ~/.ssh/config without ssh, cannot do so for {host}: {said}"
        ) from None
    only = bool(found.get("IdentitiesOnly"))
    keys = [str(Path(key).expanduser()) for key in _listed(found.get("IdentityFile"))]
    named = [str(Path(one).expanduser()) for one in _listed(found.get("CertificateFile"))]
    jump = str(found.get("ProxyJump") or "")
    user_files = found.get("UserKnownHostsFile", USER_KNOWN_HOSTS)
    global_files = found.get("GlobalKnownHostsFile", GLOBAL_KNOWN_HOSTS)
    known = [str(Path(one).expanduser()) for one in [*_listed(user_files), *_listed(global_files)]]
    name, at = str(found.get("Hostname") or host), port or int(str(found.get("Port") or 0))
    return SSHSettings(
        keys=(readable := [key for key in keys if _is_key(key, only)]),
        certificates=[*named, *(f"{key}-cert.pub" for key in readable)],
        jumps=[one.strip() for one in jump.split(",") if one.strip()],
        known_hosts=[one for one in known if Path(one).is_file() and os.access(one, os.R_OK)] or NO_HOSTS,
        known_as=str(found.get("HostKeyAlias") or known_as(f"[{name}]:{at}")),
    )


def certificates_of(host: str, user: str) -> Sequence[str]:
    """Files of the certificates that ~/.ssh/config gives a login; none where it cannot be read."""
    try:
        return read_ssh_settings(host, user).certificates
    except ConfigurationError:
        return []


def jump_of(config: SSHConfig, jumps: Sequence[str]) -> SSHConfig | None:
    """The last of `jumps` as a login, reached through those before it; None without any.

    ~/.ssh/config says of each what `user@host:port` leaves out. A jump host that is `config`'s own host is none: with
    `ProxyJump` below `Host *` that host itself is reached directly. Raises `ConfigurationError` where they have no end.
    """
    check_jumps(config.hostname, jumps)
    last: SSHConfig | None = None
    for jump in jumps[-MOST_JUMPS:]:
        user, host = _login_of(jump)
        if host == config.hostname:
            continue
        last = SSHConfig(
            hostname=host,
            username=user,
            check_host_key=config.check_host_key,
            client_keys=[],
            connect_timeout=config.connect_timeout,
            password_file=None,
            ssh_key_passphrase_file=None,
            tunnel=last,
        )
    return last


def check_jumps(host: str, jumps: Sequence[str]) -> None:
    """Raise `ConfigurationError` where the way to `host` over `jumps`, and theirs in turn, has no end."""
    way = [host]
    while jumps and (first := _login_of(jumps[0]))[1] != way[-1]:
        user, named = first
        way.append(named)
        if len(way) > MOST_JUMPS:
            raise ConfigurationError(
                f"the jump hosts of {host} in ~/.ssh/config have no end: {' over '.join(way[:4])} and so on; expected "
                "a `ProxyJump none` for the one that is reached directly"
            )
        jumps = read_ssh_settings(named, user).jumps


def _login_of(jump: str) -> tuple[str, str]:
    """User ('' where none is said) and host, perhaps with a port, of an entry of `ProxyJump`."""
    user, _, host = jump.removeprefix("ssh://").rpartition("@")
    return user, host


def _listed(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list | tuple) else []


def _is_key(path: str, public_too: bool) -> bool:
    """True for a file with a private key; with `public_too`, also for one whose private half ssh-agent has."""
    try:
        content = Path(path).read_bytes()
    except OSError:
        return False
    return public_too or b"PRIVATE KEY" in content
