"""The system's ssh, called as StreamFlow connects: never a question, host keys always checked, the same files read."""

from __future__ import annotations

import os
import pwd
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ALWAYS = (
    "-o",
    "BatchMode=yes",
    "-o",
    "StrictHostKeyChecking=yes",
    "-o",
    "NoHostAuthenticationForLocalhost=no",
    "-o",
    "PasswordAuthentication=no",
    "-o",
    "ForwardAgent=no",
    "-k",
    "-x",
    "-T",
    "-o",
    "ClearAllForwardings=yes",
    "-o",
    "Tunnel=no",
    "-o",
    "PermitLocalCommand=no",
    "-o",
    "RemoteCommand=none",
)
"""Whatever ~/.ssh/config says for a person who works there, no agent, ticket (-k), display (-x) or port of this machine
is within a facility's reach, and nothing but the appended command runs."""

KEY_OWNER = re.compile(
    r"host key (?:is known )?for ([\w.:\[\]%-]+) (?:and you have|has changed|is marked)", re.IGNORECASE
)
"""What ssh says of the host whose key it does not take, by the name that known_hosts has for it."""

BAD_CERTIFICATE = "Certificate invalid: "
"""Begins what ssh says of a host's certificate that has expired, or is not for the name by which it was asked for."""


@dataclass(frozen=True, kw_only=True)
class Login:
    """One ssh host and the account there."""

    host: str
    """Name or address, with `:port` where it is not 22."""
    user: str = ""
    key: str = ""
    """Private key's file; empty: ssh-agent, or what ~/.ssh/config says."""
    jump: Login | None = None
    """Host to go through; held to the same rules."""


def openssh_command(
    login: Login, *, connect_seconds: int, known_hosts: str = "", options: tuple[str, ...] = ()
) -> list[str]:
    """ssh, its options and the host; the remote command is to be appended. `options` are for the last host alone."""
    words = ["ssh", *ALWAYS, "-o", f"ConnectTimeout={connect_seconds}", *_identity(login)]
    files = _files(Path(pwd.getpwuid(os.getuid()).pw_dir), with_keys=not login.key)
    known = ["-o", f"UserKnownHostsFile={Path(known_hosts).expanduser()}"] if known_hosts else []
    words += [*known, *files]
    if login.jump is not None:
        jump = ["ssh", *ALWAYS, *_identity(login.jump), *known, *files, "-W", "%h:%p", *_target(login.jump)]
        words += ["-o", f"ProxyCommand={shlex.join(jump)}"]
    return [*words, *options, *_target(login)]


def _identity(login: Login) -> list[str]:
    return ["-i", str(Path(login.key).expanduser()), "-o", "IdentitiesOnly=yes"] if login.key else []


def _files(account: Path, *, with_keys: bool) -> list[str]:
    """Options that make ssh read the same files as StreamFlow, which uses $HOME where ssh uses the `account`'s home."""
    place = Path.home() / ".ssh"
    if place == account / ".ssh":
        return []
    config = ["-F", str(place / "config")] if (place / "config").is_file() else []
    found = [key for key in sorted(place.glob("id_*")) if with_keys and key.suffix == ""]
    keys = [word for key in found for word in ("-i", str(key))]
    return [*config, *keys, "-o", f"UserKnownHostsFile={place / 'known_hosts'}"]


def _target(login: Login) -> list[str]:
    host, port = parse_address(login.host)
    return [*(["-p", str(port)] if port else []), *(["-l", login.user] if login.user else []), "--", host]


def known_as(host: str) -> str:
    """The name under which known_hosts, and so `ssh-keygen -R`, has a host: with its port where that is not 22."""
    bare, port = parse_address(host)
    return f"[{bare}]:{port}" if port not in (0, 22) else bare


def key_owner(said: str) -> str:
    """The host whose key ssh complains of, as known_hosts has it: perhaps a jump host, or another name that
    ~/.ssh/config gives. '' where ssh does not say."""
    found = KEY_OWNER.findall(said)
    return found[-1] if found else ""


def shown_owner(host: str, owner: str) -> str:
    """`owner`, of whose key something is said, with the login to `host` on which it was seen where that is another."""
    return host if owner in ("", host, known_as(host)) else f"{owner} (login to {host})"


def parse_address(host: str) -> tuple[str, int]:
    """Name or address, and port (0: none is said), of `name`, `name:port`, `[address of IPv6]` or the latter with
    `:port`."""
    if host.startswith("["):
        bare, _, port = host[1:].partition("]")
        port = port.removeprefix(":")
    else:
        bare, _, port = host.partition(":")
    return bare, int(port or 0)
