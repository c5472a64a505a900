"""What ssh complains of, with advice that can be typed: hosts by name, with a port, and by address of IPv6."""

from __future__ import annotations

import pytest

from coordinator.preflight.ssh_errors import explain
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
    unknown = explain("a", deployment, command=["ssh"], code=255, out="", error="Host key verification failed.")
    assert f"`{scan} |" in unknown.fix and f"append `{scan}` to" in unknown.fix
    said = "REMOTE HOST IDENTIFICATION HAS CHANGED!"
    changed = explain("a", deployment, command=["ssh"], code=255, out="", error=said)
    assert f"ssh-keygen -R '{known}'" in changed.fix
    lost = explain("a", deployment, command=["ssh"], code=255, out="", error="ssh: Could not resolve hostname x")
    assert lost.found == f"the name {known.strip('[]').split(']')[0]} does not resolve"
