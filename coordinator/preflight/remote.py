"""Run a script at a facility: through the system's ssh as StreamFlow would connect, or here for a local one."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from coordinator.config.deployments import Connection, Deployment
from coordinator.preflight.row import Row, fail, ok
from coordinator.streamflow_plugin import openssh

ACCEPTED = re.compile(r"Server accepts key: (\S+)")
"""What `ssh -v` says of the key that let it in."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How a remote script ended."""

    code: int
    out: str
    error: str


def ssh_command(deployment: Deployment) -> list[str]:
    """The ssh command that reaches the facility."""
    jump = _login(deployment.tunnel, None) if deployment.tunnel.host else None
    seconds = min(deployment.connect_seconds, 30)
    return openssh.command(_login(deployment, jump), connect_seconds=seconds, known_hosts=deployment.known_hosts)


def _login(connection: Connection, jump: openssh.Login | None) -> openssh.Login:
    return openssh.Login(host=connection.host, user=connection.user, key=connection.key, jump=jump)


def run(
    deployment: Deployment, script: str, *, seconds: float = 60, data: bytes | None = None, verbose: bool = False
) -> Answer:
    """Give `script` to a shell there on its standard input (or, with `data`, in its command, and the data on it).

    A login shell at a facility, this environment's own on this machine: as the run's connectors do.
    """
    login = "l" if deployment.host else ""
    shell = ["bash", f"-{login}s"] if data is None else ["bash", f"-{login}c", script]
    if deployment.host:
        ssh, *options = ssh_command(deployment)
        words = [ssh, *(["-v"] if verbose else []), *options, shlex.join(shell)]
    else:
        words = shell
    try:
        result = subprocess.run(
            words, input=script.encode() if data is None else data, capture_output=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return Answer(code=124, out="", error=f"no answer within {seconds:.0f} s")
    except FileNotFoundError:
        return Answer(code=127, out="", error=f"there is no {words[0]} command on this machine")
    return Answer(
        code=result.returncode, out=result.stdout.decode(errors="replace"), error=result.stderr.decode(errors="replace")
    )


def check_connection(name: str, deployment: Deployment) -> Row:
    """Can the facility be reached, is it the right host, and does it let us in?"""
    if not deployment.host:
        return ok(name, "connection", "this machine")
    key = Path(deployment.key).expanduser() if deployment.key else None
    if key is not None and not key.is_file():
        return fail(
            name,
            "key",
            f"{key} does not exist",
            f"make one (ssh-keygen -t ed25519 -f {key}) and give its .pub to the site, or correct `key:`",
        )
    if key is not None and key.stat().st_mode & 0o077:
        return fail(
            name,
            "key",
            f"{key} can be read by others (mode {key.stat().st_mode & 0o777:o}), so ssh refuses it",
            f"chmod 600 {key}",
        )
    answer = run(
        deployment, "echo crossfed-reached\n", seconds=min(deployment.connect_seconds, 30) + 30, verbose=key is not None
    )
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
        return ok(
            name,
            "connection",
            f"{deployment.user + '@' if deployment.user else ''}{deployment.host} lets us in; its host key is known",
        )
    said = "\n".join(line for line in answer.error.splitlines() if not line.startswith("debug"))
    return explain(name, deployment, replace(answer, error=said))


def explain(name: str, deployment: Deployment, answer: Answer) -> Row:
    """ssh's complaint as a sentence with its remedy."""
    host, error = deployment.host, answer.error
    bare, _, port = host.partition(":")
    scan = f"ssh-keyscan {f'-p {port} ' if port else ''}{bare}"
    cases = [
        (
            "REMOTE HOST IDENTIFICATION HAS CHANGED",
            "host key",
            f"{host} shows another host key than known_hosts has: a reinstalled host, or somebody in between",
            "ask the site for its key's fingerprint; only if it changed: ssh-keygen -R "
            f"'{host if not port else f'[{bare}]:{port}'}', then add the new one",
        ),
        (
            "Host key verification failed",
            "host key",
            f"the host key of {host} is not in known_hosts",
            f"compare `{scan} | ssh-keygen -lf -` with the fingerprint the site publishes, then append `{scan}` to "
            "~/.ssh/known_hosts",
        ),
        (
            "Could not resolve hostname",
            "connection",
            f"the name {bare} does not resolve",
            "correct `host:`, or look at the network and VPN of this machine",
        ),
        (
            "Connection refused",
            "connection",
            f"nothing listens at {host}",
            "correct the host or its :port; the login node may be in maintenance",
        ),
        (
            "timed out",
            "connection",
            f"{host} does not answer",
            "is a VPN or a jump host (`tunnel:`) needed from here? is the site in maintenance?",
        ),
        (
            "no answer within",
            "connection",
            f"{host} took the connection but gave no shell: {error}",
            "log in by hand and see what the login waits for (a second factor? a full home?)",
        ),
        (
            "No route to host",
            "connection",
            f"there is no route to {host}",
            "is a VPN or a jump host (`tunnel:`) needed from here?",
        ),
        (
            "Permission denied",
            "login",
            f"{host} does not accept our key for {deployment.user or 'this user'}",
            "is the public key in ~/.ssh/authorized_keys there, or the certificate still valid? with ssh-agent: does "
            "`ssh-add -l` list it? `user:` right?",
        ),
        (
            "Too many authentication failures",
            "login",
            f"{host} gave up before our key was tried",
            "name the key by `key:`, or let ssh-agent hold fewer",
        ),
        ("there is no ssh", "connection", error, "install the OpenSSH client"),
    ]
    for mark, check, found, fix in cases:
        if mark.lower() in error.lower():
            return fail(name, check, found, fix)
    said = (error or answer.out).strip().splitlines()[-1:] or ["nothing"]
    return fail(
        name,
        "connection",
        f"ssh to {host} ended with {answer.code} and said: {said[0]}",
        f"try by hand: {shlex.join(ssh_command(deployment))}",
    )
