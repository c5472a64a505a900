"""What ssh's complaints mean and what to do about each."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.config.deployments import Deployment
from coordinator.preflight.row import Row, fail
from coordinator.streamflow_plugin.openssh import (
    BAD_CERTIFICATE,
    key_owner,
    known_as,
    parse_address,
    shown_owner,
)


@dataclass(frozen=True)
class Complaint:
    """A sentence of ssh, recognised by words in it. `found` and `fix` are format strings over `_words`."""

    mark: str
    """Words of ssh; case does not count."""
    check: str
    found: str
    fix: str


JUMP_FAILED = "Host key verification failed.\nkex_exchange_identification: "
"""What ssh says where a jump host's key is unknown to the ssh that it starts for it, and which names no host."""
COMPLAINTS = (
    Complaint(
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "host key",
        "{owner} shows another host key than known_hosts has: a reinstalled host, or somebody in between",
        "ask the site for its key's fingerprint; only if it changed: ssh-keygen -R '{known}', then add the new one",
    ),
    Complaint(
        "REVOKED HOST KEY",
        "host key",
        "{owner} shows a host key that known_hosts marks as revoked: somebody may have stolen it",
        "do not log in; ask the site for its present key's fingerprint, and put that key into known_hosts",
    ),
    Complaint(
        BAD_CERTIFICATE,
        "host key",
        "the certificate of the host key of {owner} is not taken: {invalid}",
        "look at the clock of this machine; name the host as the site does; else ask the site to renew its certificate",
    ),
    Complaint(
        JUMP_FAILED,
        "host key",
        "known_hosts lacks the host key of a jump host on the way to {host}",
        "log in to it by hand, and compare the key that it shows with the fingerprint the site publishes",
    ),
    Complaint(
        "Host key verification failed",
        "host key",
        "the host key of {owner} is not in known_hosts",
        "compare `{scan} | ssh-keygen -lf -` with the fingerprint the site publishes, then append `{scan}` to "
        "~/.ssh/known_hosts",
    ),
    Complaint(
        "Could not resolve hostname",
        "connection",
        "the name {bare} does not resolve",
        "correct `host:`, or look at the network and VPN of this machine",
    ),
    Complaint(
        "Connection refused",
        "connection",
        "nothing listens at {host}",
        "correct the host or its :port; the login node may be in maintenance",
    ),
    Complaint(
        "timed out",
        "connection",
        "{host} does not answer",
        "is a VPN or a jump host (`tunnel:`) needed from here? is the site in maintenance?",
    ),
    Complaint(
        "no answer within",
        "connection",
        "{host} took the connection but gave no shell: {error}",
        "log in by hand and see what the login waits for (a second factor? a full home?)",
    ),
    Complaint(
        "No route to host",
        "connection",
        "there is no route to {host}",
        "is a VPN or a jump host (`tunnel:`) needed from here?",
    ),
    Complaint(
        "Permission denied",
        "login",
        "{host} does not accept our key for {user}",
        "is the public key in ~/.ssh/authorized_keys there, or the certificate still valid? with ssh-agent: does "
        "`ssh-add -l` list it? `user:` right?",
    ),
    Complaint(
        "Too many authentication failures",
        "login",
        "{host} gave up before our key was tried",
        "name the key by `key:`, or let ssh-agent hold fewer",
    ),
    Complaint(
        "refused by the gate",
        "gate",
        "{host} lets our key through a gate, and gives no shell",
        "set `gate: true` in its deployment: the site's own policy then has template and limits",
    ),
    Complaint(
        "the gate is closed",
        "gate",
        "the gate of {host} is closed: {last}",
        "tell the site: its policy.yml or the gate's log is not sound",
    ),
    Complaint("there is no ssh", "connection", "{error}", "install the OpenSSH client"),
)


OURS = 124
"""The first of the exit codes for what was not ssh's, nor the other side's, to say (`remote.answer_of`)."""
QUIET = (
    "in the shell's start-up files there (~/.bashrc, ~/.profile, ~/.cshrc), a line may exit, ask a question, or start "
    "another shell: let it do so in terminals only (bash: `case $- in *i*) ;; *) return ;; esac` above it)"
)
"""What to do about a login that runs no command."""


def explain_ssh_failure(
    name: str, deployment: Deployment, *, command: Sequence[str], code: int, out: str, error: str
) -> Row:
    """How `command`, an ssh that failed, ended, as a sentence with its remedy."""
    error = "\n".join(error.splitlines())  # ssh ends a line with a carriage return, too
    words = _words(deployment, error)
    for complaint in COMPLAINTS:
        if complaint.mark.lower() in error.lower():
            return fail(name, complaint.check, complaint.found.format(**words), complaint.fix.format(**words))
    said = (error or out).strip().splitlines()[-1:] or ["nothing"]
    if code < OURS and not deployment.gate:
        found = f"{deployment.host} lets us in, but its shell runs no command of ours: it ended with {code} and said: "
        return fail(name, "shell", found + said[0], QUIET)
    return fail(
        name,
        "connection",
        f"ssh to {deployment.host} ended with {code} and said: {said[0]}",
        f"try by hand: {shlex.join(command)}",
    )


def _words(deployment: Deployment, error: str) -> dict[str, str]:
    """What a complaint's sentences may name."""
    bare, _ = at, at_port = parse_address(deployment.host)
    owner = key_owner(error) or known_as(deployment.host)
    if owner != known_as(deployment.host):
        at, at_port = parse_address(owner if owner.startswith("[") or owner.count(":") < 2 else f"[{owner}]")
    return {
        "host": deployment.host,
        "bare": bare,
        "owner": shown_owner(deployment.host, owner),
        "known": owner,
        "scan": f"ssh-keyscan {f'-p {at_port} ' if at_port else ''}{at}",
        "invalid": error.partition(BAD_CERTIFICATE)[2].partition("\n")[0].strip(),
        "user": deployment.user or "this user",
        "error": error,
        "last": (error.strip().splitlines() or [""])[-1],
    }
