"""Run a script at a facility: through the system's ssh as StreamFlow would connect, or here for a local one."""

from __future__ import annotations

import base64
import re
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from coordinator.config.deployments import Connection, Deployment
from coordinator.config.firecrest import FIRECREST
from coordinator.preflight.bounded_process import MOST_BYTES, TooMuchOutput, run_bounded
from coordinator.preflight.row import Row, fail, ok
from coordinator.preflight.ssh_errors import explain_ssh_failure
from coordinator.streamflow_plugin import openssh
from coordinator.streamflow_plugin.key_file import read_key_file
from facility.exchange.errors import ConfigurationError, InputError, TransientError
from facility.exchange.exit_codes import BROKE
from facility.exchange.messages.strict_json import clean_text

OWN_WORDS = ("debug", "OpenSSH_", "Authenticated to ", "Transferred: ", "Bytes per second: ")
"""Begin the lines of `ssh -v` that are neither a complaint nor the other side's."""
WAY = ("hostname", "port", "user", "proxyjump", "proxycommand")
"""What decides where ssh connects, and as whom."""
ACCEPTED = re.compile(r"Server accepts key: (\S+)")
"""What `ssh -v` says of the key that let it in."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How a remote script ended."""

    code: int
    out: str
    error: str


def login_seconds(deployment: Deployment) -> int:
    """How long a check waits for a connection."""
    return min(deployment.connect_seconds, 30)


def answer_seconds(deployment: Deployment) -> int:
    """How long a check waits for a first answer, the connection included."""
    return login_seconds(deployment) + 30


def ssh_command(deployment: Deployment, *, as_a_run: bool = False) -> list[str]:
    """The ssh command that reaches the facility; with the files of host keys that a run reads, which knows no
    `known_hosts`, if `as_a_run`."""
    jump = _login(deployment.tunnel, None) if deployment.tunnel.host else None
    # A connection that ssh would share, and keep open in the background, would hold our pipes with it.
    return openssh.openssh_command(
        _login(deployment, jump),
        connect_seconds=login_seconds(deployment),
        known_hosts="" if as_a_run else deployment.known_hosts,
        options=("-o", "ControlMaster=no"),
    )


def _login(connection: Connection, jump: openssh.Login | None) -> openssh.Login:
    return openssh.Login(host=connection.host, user=connection.user, key=connection.key, jump=jump)


def run_there(
    deployment: Deployment, script: str, *, seconds: float = 60, data: bytes | None = None, verbose: bool = False
) -> Answer:
    """Give `script` to a shell there on its standard input (or, with `data`, in its command, and the data on it).

    A login shell at a facility, this environment's own on this machine: as the run's connectors do.
    """
    if deployment.type == FIRECREST:
        return Answer(code=126, out="", error="FirecREST gives no shell")
    login = "l" if deployment.host else ""
    shell = ["bash", f"-{login}s"] if data is None else ["bash", f"-{login}c", script]
    if deployment.host:
        ssh, *options = ssh_command(deployment)
        words = [ssh, *(["-v"] if verbose else []), *options, shlex.join(shell)]
    else:
        words = shell
    return answer_of(words, data=script.encode() if data is None else data, seconds=seconds)


def answer_of(words: Sequence[str], *, data: bytes | IO[bytes], seconds: float) -> Answer:
    """How a command ended whose input is `data` or comes from that pipe; code 124 after `seconds`, 125 where it answers
    without an end."""
    try:
        code, out, error = run_bounded(words, data=data, seconds=seconds)
    except subprocess.TimeoutExpired:
        return Answer(code=124, out="", error=f"no answer within {seconds:.0f} s")
    except TooMuchOutput:
        return Answer(code=125, out="", error=f"more than {MOST_BYTES >> 20} MiB for an answer")
    except (FileNotFoundError, PermissionError):  # the latter where a folder of PATH may not be read
        return Answer(code=127, out="", error=f"there is no {words[0]} command on this machine")
    return Answer(code=code, out=out.decode(errors="replace"), error=error.decode(errors="replace"))


def login_error(row: Row, text: str) -> InputError | TransientError:
    """The error `text` for a login that failed as `row` says: a host that does not answer, or does not take a key yet,
    may do so later; a key file, a host key or a gate stays as it is until a person here changes something."""
    return TransientError(text) if row.check in ("connection", "login") else InputError(text)


def other_way(name: str, deployment: Deployment) -> Row | None:
    """A row where a run would not go the way that ssh goes."""
    return _unread(name, deployment) or _of_all_accounts(name, deployment)


def unknown_to_a_run(name: str, deployment: Deployment, request: str) -> Row | None:
    """A row where the host's key is in the file `known_hosts` alone, which a run does not read. `request`: for the
    login that tells."""
    from coordinator.streamflow_plugin.ssh_settings import read_ssh_settings

    if not deployment.known_hosts:
        return None
    file = str(Path(deployment.known_hosts).expanduser())
    with suppress(ConfigurationError):
        if file in list(read_ssh_settings(deployment.host, deployment.user).known_hosts):
            return None
    words = [*ssh_command(deployment, as_a_run=True), request]
    answer = answer_of(words, data=b"", seconds=answer_seconds(deployment))
    if answer.code != BROKE or "Host key verification failed" not in answer.error:
        return None
    return fail(
        name,
        "ssh settings",
        f"{file} has the host key of {deployment.host}, and the files that a run reads do not, which are "
        "~/.ssh/known_hosts or the `UserKnownHostsFile` of ~/.ssh/config",
        f"append that key to ~/.ssh/known_hosts, or say `UserKnownHostsFile {file}` below a `Host "
        f"{openssh.parse_address(deployment.host)[0]}` line of ~/.ssh/config",
    )


def _unread(name: str, deployment: Deployment) -> Row | None:
    """A row where ~/.ssh/config has a line that ssh reads and a run, which does without ssh, cannot."""
    from coordinator.streamflow_plugin.ssh_settings import check_jumps, read_ssh_settings

    hosts = [] if deployment.ssh == "system" else [deployment, deployment.tunnel, deployment.transfer]
    for one in (one for one in hosts if one.host):
        try:
            check_jumps(one.host, read_ssh_settings(one.host, one.user).jumps)
        except ConfigurationError as error:
            fix = "correct that line (no comment behind it, no condition, no circle), or set `ssh: system`"
            return fail(name, "ssh settings", error.message, fix)
    return None


def _of_all_accounts(name: str, deployment: Deployment) -> Row | None:
    """A row where /etc/ssh/ssh_config, which ssh reads and a run does not, leads another way than ~/.ssh/config."""
    if deployment.ssh == "system":
        return None
    jump = _login(deployment.tunnel, None) if deployment.tunnel.host else None
    for one, over in ((deployment, jump), (deployment.tunnel, None), (deployment.transfer, None)):
        ssh, *options = openssh.openssh_command(_login(one, over), connect_seconds=10)
        if not one.host or "-F" in options:  # then ssh reads that file alone
            continue
        own = Path("~/.ssh/config").expanduser()
        files: tuple[list[str], list[str]] = (["-F", str(own) if own.is_file() else "none"], [])
        mine, every = (answer_of([ssh, *file, "-G", *options], data=b"", seconds=10) for file in files)
        if mine.code == every.code == 0 and (said := _other_lines(mine.out, every.out)):
            found = f"/etc/ssh/ssh_config says `{'`, `'.join(said)}` of {one.host}, and a run reads ~/.ssh/config alone"
            return fail(name, "ssh settings", found, "say the same there, below a `Host` line, or set `ssh: system`")
    return None


def _other_lines(mine: str, every: str) -> list[str]:
    """Lines of `every`, what `ssh -G` prints, on the way to a host that are not in `mine`, which it prints without a
    file of settings."""
    known = {line.strip() for line in mine.splitlines()}
    lines = [line.strip() for line in every.splitlines() if line.partition(" ")[0] in WAY]
    return [clean_text(line, 200) for line in lines if line not in known]


def _unfit(name: str, key: Path) -> Row | None:
    """A row where ssh would not take `key`."""
    if not key.is_file():
        fix = f"make one (ssh-keygen -t ed25519 -f {key}) and give its .pub to the site, or correct `key:`"
        return fail(name, "key", f"{key} does not exist", fix)
    if read_key_file(key).public:
        fix = f"name the private key, {key.with_suffix('') if key.suffix == '.pub' else 'a file without .pub'}"
        return fail(name, "key", f"{key} is a public key", fix)
    if (mode := key.stat().st_mode & 0o777) & 0o077:
        found = f"{key} can be read by others (mode {mode:o}), so ssh refuses it"
        return fail(name, "key", found, f"chmod 600 {key}")
    return None


def _left_to_agent(key: Path) -> bool:
    """Whether `key` has a passphrase and ssh-agent does not hold it, so that ssh could not use it."""
    file = read_key_file(key)
    if not file.encrypted:
        return False
    held = answer_of(["ssh-add", "-L"], data=b"", seconds=10).out.split()
    return not any(base64.b64encode(one).decode() in held for one in file.identities)


def check_connection(name: str, deployment: Deployment) -> Row:
    """A row on whether the facility can be reached, is the right host, and lets us in."""
    if not deployment.host:
        return ok(name, "connection", "this machine")
    key = Path(deployment.key).expanduser() if deployment.key else None
    if key is not None and (row := _unfit(name, key)) is not None:
        return row
    if (row := other_way(name, deployment)) is not None:
        return row
    seconds = answer_seconds(deployment)
    answer = run_there(deployment, "echo crossfed-reached\n", seconds=seconds, verbose=key is not None)
    if answer.code == 0 and "crossfed-reached" in answer.out:
        accepted = ACCEPTED.findall(answer.error)
        if key is not None and accepted and Path(accepted[-1]) != key:
            return fail(
                name,
                "key",
                f"{deployment.host} let in {accepted[-1]}, which ~/.ssh/config names, not `key: {key}`, and "
                "StreamFlow will offer only that",
                f"give {key}.pub to the site, or set `key: {accepted[-1]}`",
            )
        return unknown_to_a_run(name, deployment, "true") or ok(
            name,
            "connection",
            f"{deployment.user + '@' if deployment.user else ''}{deployment.host} lets us in; its host key is known",
        )
    if answer.code == BROKE and "Permission denied" in answer.error and key is not None and _left_to_agent(key):
        found = f"{key} has a passphrase, and ssh-agent does not hold it: {deployment.host} does not let us in"
        fix = f'eval "$(ssh-agent)"; ssh-add {key}'
        if deployment.passphrase_file:
            fix += "; `passphrase_file` serves the run alone, checks and set-up ask ssh-agent"
        return fail(name, "login", found, fix)
    said = "\n".join(line for line in answer.error.splitlines() if not line.startswith(OWN_WORDS))
    command = ssh_command(deployment)
    return explain_ssh_failure(name, deployment, command=command, code=answer.code, out=answer.out, error=said)
