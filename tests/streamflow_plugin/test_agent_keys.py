"""A key with a passphrase is ssh-agent's to use, as for ssh itself; a key that is named is the only one offered."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest

from coordinator.streamflow_plugin.key_file import KeyFile, read_key_file
from coordinator.streamflow_plugin.ssh import CarefulContext
from tests.streamflow_plugin.logins import logged_in


def make_key(path: Path, *options: str, passphrase: str = "") -> Path:
    subprocess.run(["ssh-keygen", "-q", "-N", passphrase, "-f", str(path), *(options or ("-t", "ed25519"))], check=True)
    return path


def blob_of(key: Path) -> bytes:
    return asyncssh.read_public_key(f"{key}.pub").public_data


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty agent of the test's own, and no ~/.ssh."""
    said = subprocess.run(["ssh-agent", "-s", "-a", str(tmp_path / "s")], capture_output=True, text=True, check=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "s"))
    yield
    os.kill(int(said.stdout.split("SSH_AGENT_PID=")[1].split(";")[0]), 15)


def hold(key: Path) -> None:
    """Let the agent hold a key whose passphrase is `secret`."""
    ask = key.with_name("ask")
    ask.write_text("#!/bin/sh\necho secret\n")
    ask.chmod(0o700)
    environment = os.environ | {"SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": "none"}
    subprocess.run(["ssh-add", "-q", str(key)], env=environment, stdin=subprocess.DEVNULL, check=True)


class Accepts(asyncssh.SSHServer):
    """Lets `keys` in; keeps which were offered."""

    def __init__(self, keys: list[bytes], offered: list[bytes]) -> None:
        self.keys, self.offered = keys, offered

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        self.offered.append(key.public_data)
        return key.public_data in self.keys


async def log_in(key: Path, accepted: list[Path]) -> list[bytes]:
    """The keys that a login with `key` offers to a host that takes those `accepted`. Raises what asyncssh does."""
    offered: list[bytes] = []
    keys = [blob_of(one) for one in accepted]
    own = asyncssh.generate_private_key("ssh-ed25519")
    async with await asyncssh.listen(
        "127.0.0.1", 0, server_factory=lambda: Accepts(keys, offered), server_host_keys=[own]
    ) as server:
        async with await logged_in(CarefulContext, server, keys=[key]):
            return offered


@pytest.mark.parametrize("with_pub", [True, False])
def test_a_key_with_a_passphrase_is_used_through_the_agent(tmp_path: Path, agent: None, with_pub: bool):
    key, copy = make_key(tmp_path / "key", passphrase="secret"), tmp_path / "moved" / "key"
    copy.parent.mkdir()
    copy.hardlink_to(key)
    hold(key)
    assert set(asyncio.run(log_in(key if with_pub else copy, [key]))) == {blob_of(key)}


def test_no_other_key_of_the_agent_takes_the_place_of_the_one_that_is_named(tmp_path: Path, agent: None):
    """Else a gate's key would not be used where the person's own opens a shell."""
    named, other = make_key(tmp_path / "gate"), make_key(tmp_path / "shell", passphrase="secret")
    hold(other)
    assert set(asyncio.run(log_in(named, [named, other]))) == {blob_of(named)}
    with pytest.raises(asyncssh.PermissionDenied):
        asyncio.run(log_in(named, [other]))


def test_a_passphrase_without_an_agent_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with pytest.raises(asyncssh.KeyImportError, match="Passphrase"):
        key = make_key(tmp_path / "key", passphrase="secret")
        asyncio.run(log_in(key, [key]))


@pytest.mark.parametrize("options", [("-t", "ed25519"), ("-t", "rsa", "-b", "2048"), ("-t", "ecdsa", "-m", "PEM")])
@pytest.mark.parametrize("passphrase", ["", "secret"])
def test_a_key_file_is_read_without_its_passphrase(tmp_path: Path, options: tuple[str, ...], passphrase: str):
    key = make_key(tmp_path / "key", *options, passphrase=passphrase)
    assert read_key_file(key) == KeyFile(encrypted=bool(passphrase), identities=(blob_of(key),))
    assert read_key_file(f"{key}.pub").public and not read_key_file(key).public
    (tmp_path / "key.pub").unlink()
    assert read_key_file(key).encrypted is bool(passphrase)


def test_a_certificate_beside_the_key_is_one_of_its_identities(tmp_path: Path):
    key, authority = make_key(tmp_path / "key"), make_key(tmp_path / "authority")
    subprocess.run(["ssh-keygen", "-q", "-s", str(authority), "-I", "me", f"{key}.pub"], check=True)
    certificate = asyncssh.read_certificate(f"{key}-cert.pub").public_data
    assert read_key_file(key).identities == (blob_of(key), certificate)


@pytest.mark.parametrize(
    "text", [b"", b"\xff\x00", b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END", b"ssh-rsa AAAA"]
)
def test_what_is_no_key_is_said_to_be_none(tmp_path: Path, text: bytes):
    (tmp_path / "key").write_bytes(text)
    found = read_key_file(tmp_path / "key")
    assert not found.encrypted and not found.identities
    assert read_key_file(tmp_path / "none") == KeyFile()
