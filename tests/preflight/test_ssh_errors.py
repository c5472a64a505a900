"""What ssh complains of, with advice that can be typed: hosts by name, with a port, and by address of IPv6."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from coordinator.preflight import remote
from coordinator.preflight.remote import Answer, check_connection
from coordinator.preflight.ssh_errors import explain_ssh_failure
from tests.deployments import read_deployment


@pytest.mark.parametrize(
    ("host", "scan", "known"),
    [
        ("login.example.org", "ssh-keyscan login.example.org", "login.example.org"),
        ("login.example.org:2222", "ssh-keyscan -p 2222 login.example.org", "[login.example.org]:2222"),
        ("[2001:db8::7]", "ssh-keyscan 2001:db8::7", "2001:db8::7"),
        ("[2001:db8::7]:2222", "ssh-keyscan -p 2222 2001:db8::7", "[2001:db8::7]:2222"),
    ],
)
def test_advice_names_the_host_as_ssh_keyscan_and_ssh_keygen_take_it(host: str, scan: str, known: str):
    deployment = read_deployment({"type": "ssh", "host": host, "workdir": "/w"}, "d")
    unknown = explain_ssh_failure(
        "a", deployment, command=["ssh"], code=255, out="", error="Host key verification failed."
    )
    assert f"`{scan} |" in unknown.fix and f"append `{scan}` to" in unknown.fix
    said = "REMOTE HOST IDENTIFICATION HAS CHANGED!"
    changed = explain_ssh_failure("a", deployment, command=["ssh"], code=255, out="", error=said)
    assert f"ssh-keygen -R '{known}'" in changed.fix
    lost = explain_ssh_failure(
        "a", deployment, command=["ssh"], code=255, out="", error="ssh: Could not resolve hostname x"
    )
    assert lost.found == f"the name {known.strip('[]').split(']')[0]} does not resolve"


def test_a_jump_host_whose_key_is_unknown_is_not_told_as_the_facility():
    """The ssh that ssh starts for it names no host; `crossfed quickstart` asked to trust the facility's key."""
    said = "Host key verification failed.\r\nkex_exchange_identification: Connection closed by remote host\r\n"
    deployment = read_deployment({"type": "ssh", "host": "login.site", "workdir": "/w"}, "d")
    error = f"{said}Connection closed by UNKNOWN port 65535\r\n"
    row = explain_ssh_failure("a", deployment, command=["ssh"], code=255, out="", error=error)
    assert row.check == "host key" and "of a jump host on the way to login.site" in row.found
    assert "not in known_hosts" not in row.found and "keyscan" not in row.fix


@pytest.mark.parametrize("code", [0, 1])
def test_a_shell_that_ends_before_our_command_is_told_from_a_login_that_fails(code: int):
    """A start-up file exits, asks or starts another shell: ssh itself has succeeded."""
    deployment = read_deployment({"type": "ssh", "host": "h", "workdir": "/w"}, "d")
    row = explain_ssh_failure("a", deployment, command=["ssh"], code=code, out="", error="")
    assert row.check == "shell" and "h lets us in" in row.found and "~/.bashrc" in row.fix
    broken = explain_ssh_failure(
        "a", deployment, command=["ssh"], code=255, out="", error="kex_exchange: reset by peer"
    )
    assert broken.check == "connection" and "reset by peer" in broken.found
    gated = read_deployment({"type": "slurm", "host": "h", "user": "u", "workdir": "/w", "gate": True}, "d")
    assert explain_ssh_failure("a", gated, command=["ssh"], code=1, out="", error="odd").check == "connection"


def login(key: Path) -> dict[str, object]:
    return {"type": "ssh", "host": "h", "user": "u", "workdir": "/w", "key": str(key)}


def make_key(path: Path, passphrase: str) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(path)], check=True)
    return path


def test_a_public_key_is_named_as_what_it_is(tmp_path: Path):
    """Not as a private one that others can read: chmod would not help."""
    key = make_key(tmp_path / "id", "")
    row = check_connection("a", read_deployment(login(Path(f"{key}.pub")), "d"))
    assert row.check == "key" and "is a public key" in row.found and row.fix.endswith(str(key))


@pytest.mark.parametrize("passphrase", ["", "secret"])
def test_a_key_whose_passphrase_no_agent_knows_is_told_from_one_that_the_site_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passphrase: str
):
    refusal = Answer(code=255, out="", error="u@h: Permission denied (publickey).")
    monkeypatch.setattr(remote, "run_there", lambda *_, **__: refusal)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "no agent"))
    key = make_key(tmp_path / "id", passphrase)
    row = check_connection("a", read_deployment(login(key), "d"))
    assert row.check == "login"
    assert (f"ssh-add {key}" in row.fix and "has a passphrase" in row.found) is bool(passphrase)
