"""Quickstart at a gate: it asks the gate, writes what the policy says, and tells in one sentence what is not its."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.config.deployments import Deployment
from coordinator.config.federation import read_federation
from coordinator.preflight import gate as asking
from coordinator.preflight import remote
from coordinator.preflight.gate_answer import GateSummary
from coordinator.preflight.remote import Answer
from coordinator.preflight.row import fail
from coordinator.quickstart import begin as beginning
from coordinator.quickstart.begin import Request, begin
from coordinator.quickstart.describe import RoundTraining
from coordinator.quickstart.dialog import Dialog
from coordinator.quickstart.gated import LIMITS, ask_gate, choose_gated
from facility.exchange.errors import InputError, TransientError
from facility.gate import hello
from facility.gating.policy import read_policy
from facility.gating.session import Session
from tests.security import test_gate
from tests.security.test_gate import KEY, Gate

site = test_gate.site
LOGIN = Deployment(type="ssh", host="login.example.org", user="alice", workdir="/tmp")
SAID = """OpenSSH_9.2p1 Debian-2+deb12u7
Authenticated to login.example.org ([10.0.0.1]:22) using "publickey".
refused by the gate: 'bash -ls' is not a request, expected crossfed-gate and one of hello, nothing
Transferred: sent 3000, received 3100 bytes, in 0.5 seconds
Bytes per second: sent 6096.7, received 6303.4
"""
"""What `ssh -v` prints at a gate, without its debug lines."""


def answering(monkeypatch: pytest.MonkeyPatch, hello: Any, blocks: int = 96) -> None:
    """A gate that says this, and whose probe finds a dataset of that many blocks."""
    answers = {"hello": hello, "probe": {"dataset": {"blocks": {"train": blocks}}}}
    monkeypatch.setattr(
        asking, "send_to_gate", lambda _, verb, *__, **___: Answer(code=0, out=json.dumps(answers[verb]), error="")
    )


def told(site: Gate) -> dict[str, Any]:
    """What the gate itself says."""
    session = Session(policy=read_policy(site.home / "policy.yml"), key=KEY, state=site.home / "gate")
    site.capture.readouterr()
    assert hello(session, None) == 0  # type: ignore[arg-type]
    found: dict[str, Any] = json.loads(site.capture.readouterr().out)
    return found


def test_what_a_gate_tells_is_what_is_written(site: Gate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog):
    answering(monkeypatch, told(site))
    monkeypatch.setattr(remote, "run_there", lambda *_, **__: Answer(code=77, out="", error=SAID))
    monkeypatch.setattr(beginning, "_model", lambda *_: tmp_path / "fed" / "model")
    key = tmp_path / "id"
    key.touch(mode=0o600)
    caplog.set_level("INFO", logger="coordinator")
    request = Request(
        folder=tmp_path / "fed",
        name="heron",
        facilities={"alpha": "alice@login.example.org"},
        model="demo",
        data={},
        keys={"": str(key)},
        plan=RoundTraining(rounds=1),
        set_up=False,
    )
    federation = read_federation(begin(request, Dialog(given={}, yes=True)))
    (one,) = federation.facilities
    assert one.deployment.gate and one.deployment.type == "slurm" and not one.deployment.template
    assert (one.deployment.workdir, one.dataset) == (str(site.workdir), str(site.home / "data"))
    assert federation.sending.signing_key == str(key)
    told_by_us = [record.message for record in caplog.records]
    assert told_by_us.count(f"alpha: {LIMITS}") == 1
    assert any("its gate allows alpha in heron: jobs of 1 node and 2 h by slurm" in one for one in told_by_us)
    again = read_federation(begin(request, Dialog(given={}, yes=True)))
    assert again == federation


@pytest.mark.parametrize(
    ("name", "federation", "data", "words"),
    [
        ("beta", "heron", "", "calls the site 'alpha': give --facility alpha=alice@login.example.org"),
        ("alpha", "egret", "", "give --name with one of them"),
        ("alpha", "heron", "text.txt", "text is prepared by the site itself: give --data alpha=PATH"),
    ],
)
def test_what_the_policy_has_otherwise_is_an_error_with_its_remedy(name: str, federation: str, data: str, words: str):
    behind = GateSummary(
        facility="alpha", federations=("heron",), scheduler="slurm", workdir="/scratch/x", datasets=("data/it",)
    )
    with pytest.raises(InputError) as raised:
        choose_gated(Dialog(given={}, yes=True), name, LOGIN, behind, data, federation)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"facility": "a; rm -rf /"},
        {"workdir": "relative"},
        {"workdir": "/a'b"},
        {"scheduler": "bash"},
        {"federations": "heron"},
        {"nodes": "many"},
        {"gate": "yes"},
    ],
)
def test_an_answer_that_is_none_of_a_gate_is_not_used(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]):
    sound = {"gate": 1, "facility": "alpha", "federations": ["heron"], "scheduler": "slurm", "workdir": "/scratch/x"}
    sound |= {"nodes": 1, "hours": 2.0, "datasets": ["data/it", 5, "x" * 401, "a\x1b[2J"]}
    answering(monkeypatch, sound)
    found = ask_gate(LOGIN)
    assert found is not None and found.datasets == ("data/it",)
    answering(monkeypatch, sound | change)
    assert ask_gate(LOGIN) is None


def test_a_login_that_fails_for_another_reason_asks_no_gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    row = fail("alpha", "login", "login.example.org does not accept our key for alice", "is the key there?")
    monkeypatch.setattr(beginning, "check_connection", lambda name, login: row)
    monkeypatch.setattr(asking, "send_to_gate", lambda *_, **__: pytest.fail("asked"))
    request = Request(
        folder=tmp_path,
        name="f",
        facilities={"alpha": "alice@login.example.org"},
        model="demo",
        data={},
        plan=RoundTraining(),
    )
    with pytest.raises(TransientError, match="does not accept our key"):
        begin(request, Dialog(given={}, yes=True))
