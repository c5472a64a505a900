"""Certificates' ends, from real certificates that ssh-keygen signs and an agent holds."""

from __future__ import annotations

import os
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coordinator.certificates import Lifetime, certificate_lifetime, certificates_watched
from coordinator.config.deployments import Deployment
from tests.deployments import read_deployment
from tests.engine.messages import engine_messages


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    for name in ("authority", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    return tmp_path / "key"


def sign(key: Path, *validity: str) -> None:
    words = ["ssh-keygen", "-q", "-s", str(key.with_name("authority")), "-I", "me", "-n", "me", *validity]
    subprocess.run([*words, f"{key}.pub"], check=True)


def rows(*args, **fields) -> list[Lifetime]:
    return [one] if (one := certificate_lifetime(*args, **fields)) is not None else []


def deployment(**fields) -> Deployment:
    return read_deployment({"type": "ssh", "host": "login.a", "workdir": "/w"} | fields, "d")


def test_a_certificate_is_ok_then_warned_of_then_fails(key: Path):
    described = deployment(key=str(key), renew="step ssh login")
    assert rows("a", described) == [], "a bare key has no end"
    sign(key)
    assert rows("a", described) == [], "valid for ever"
    sign(key, "-V", "-1m:+12h")
    now = datetime.now(UTC)
    assert [row.verdict for row in rows("a", described)] == ["ok"]
    assert [row.verdict for row in rows("a", described, hours=24.0)] == ["warning"]
    assert [row.verdict for row in rows("a", described, now=now + timedelta(hours=11))] == ["warning"]
    (row,) = rows("a", described, now=now + timedelta(hours=12, seconds=5))
    assert row.verdict == "fail" and row.fix == "crossfed login a"
    sign(key, "-V", "always:+1s")
    time.sleep(2.1)
    assert [row.verdict for row in rows("a", described)] == ["fail"]


@pytest.mark.parametrize("line", ["IdentityFile {key}", "CertificateFile {key}-cert.pub"])
def test_a_certificate_that_the_users_configuration_names_for_the_host_is_told_of(key: Path, monkeypatch, line: str):
    """Without `key:` the login is what ~/.ssh/config says; no agent holds this certificate."""
    monkeypatch.setenv("HOME", str(key.parent))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (key.parent / ".ssh").mkdir()
    (key.parent / ".ssh" / "config").write_text(f"Host login.a\n  {line.format(key=key)}\n")
    sign(key, "-V", "-1m:+1h")
    assert [row.verdict for row in rows("a", deployment())] == ["warning"]
    assert rows("b", deployment(host="login.b")) == [], "another host's login has none"


def test_a_comment_in_another_encoding_hides_no_certificate(key: Path, monkeypatch: pytest.MonkeyPatch):
    """A key's comment is whatever its owner typed, and where."""
    sign(key, "-V", "-1m:+1h")
    certificate = Path(f"{key}-cert.pub").read_bytes().split()
    told = key.with_name("told")
    told.write_bytes(b"ssh-ed25519 AAAA M\xfcller\n" + b" ".join([*certificate[:2], b"M\xfcller@laptop"]) + b"\n")
    program = key.with_name("bin") / "ssh-add"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat '{told}'\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    assert [row.verdict for row in rows("a", deployment())] == ["warning"]


def test_the_agents_certificates_are_read(key: Path, monkeypatch: pytest.MonkeyPatch):
    sign(key, "-V", "-1m:+1h")
    socket = key.with_name("agent")
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        for _ in range(4000):
            if socket.exists():
                break
            time.sleep(0.05)
        assert rows("a", deployment()) == []
        subprocess.run(["ssh-add", "-q", key], check=True)
        assert [row.verdict for row in rows("a", deployment())] == ["warning"]
    finally:
        agent.terminate()
        agent.wait()


def test_while_a_federation_runs_each_is_told_once(key: Path):
    from types import SimpleNamespace

    sign(key, "-V", "-1m:+1h")
    said = engine_messages()
    facility = SimpleNamespace(name="a", deployment=deployment(key=str(key)))
    with certificates_watched([facility], 0.05):  # type: ignore[list-item]
        deadline = time.monotonic() + 200
        while not said and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # ten more looks
    assert len(said) == 1 and said[0].startswith("a: the ssh certificate ends at")
