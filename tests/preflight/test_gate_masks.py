"""What `crossfed check` says of secure aggregation behind a gate, from what the gate told of its policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.config.federation import read_federation
from coordinator.engine.render import render
from coordinator.preflight import gate
from coordinator.preflight.remote import Answer


@pytest.mark.parametrize(
    ("masks", "told", "verdict", "words"),
    [
        (True, {"masks": True, "minimum_sum": 0}, "ok", "agree"),
        (True, {"masks": True, "minimum_sum": 3}, "ok", "agree"),
        (True, {"masks": True, "minimum_sum": 5}, "fail", "sums of 5 updates or more, of 4 facilities"),
        (True, {"masks": True, "minimum_sum": 4}, "warning", "privacy.minimum_sum is 3"),
        (True, {"masks": False, "minimum_sum": 0}, "fail", "names no peer_signers"),
        (True, {}, "fail", "names no peer_signers"),
        (False, {}, "ok", "agree"),
    ],
)
def test_the_policys_demands_are_told_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masks: bool, told: dict[str, Any], verdict: str, words: str
):
    deployment = {"type": "slurm", "host": "login", "workdir": "/scratch/x", "gate": True}
    content: dict[str, Any] = {
        "name": "heron",
        "model": "model",
        "rounds": 1,
        "sending": {"signing_key": "key"},
        "facilities": [{"name": name, "dataset": "d", "deployment": deployment} for name in "abcd"],
    }
    if masks:
        content |= {
            "aggregation": {"allowed_signers": "signers"},
            "training": {"export_dtype": "float32", "signing_key": "k"},
            "privacy": {"secure_aggregation": True, "peer_signers": "~/peers"},
        }
    file = tmp_path / "workflow" / "federation.yml"
    file.parent.mkdir()
    file.write_text(yaml.safe_dump(content))
    answers = {
        "hello": {"gate": 1, "facility": "a", "federations": ["heron"], "scheduler": "slurm", "workdir": "/scratch/x"}
        | {"nodes": 1, "hours": 1.0}
        | told
    }

    def ask(_: object, verb: str, **__: object) -> Answer:
        return Answer(code=0, out=json.dumps(answers.get(verb, "")), error="")

    monkeypatch.setattr(gate, "send_to_gate", ask)
    federation = read_federation(file)
    rows = [row for row in gate.check_gate(federation, federation.facilities[0], link=False) if row.check == "policy"]
    assert [(row.verdict, words in row.found) for row in rows[:1]] == [(verdict, True)], rows
    assert [row.verdict for row in rows[1:]] == (["ok"] if verdict == "warning" else []), rows


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("refuses", [False, True])
def test_the_gate_is_asked_what_its_policy_says_of_the_settings_that_a_run_would_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, refuses: bool
):
    """A gate of an earlier version, which does not know the request, says it of the first job."""
    deployment = {"type": "slurm", "host": "login", "workdir": "/scratch/x", "gate": True}
    (tmp_path / "workflow").mkdir()
    file = tmp_path / "workflow" / "federation.yml"
    facility = {"name": "a", "dataset": "/data/it", "deployment": deployment, "training": {"steps": 7}}
    content = {"name": "heron", "model": "model", "rounds": 1, "sending": {"signing_key": "key"}}
    file.write_text(yaml.safe_dump(content | {"facilities": [facility]}))
    federation = read_federation(file)
    hello = {"gate": version, "facility": "a", "federations": ["heron"], "scheduler": "slurm", "workdir": "/scratch/x"}
    asked = []

    def ask(_: object, verb: str, *words: str, data: bytes = b"", **__: object) -> Answer:
        if verb == "hello":
            return Answer(code=0, out=json.dumps(hello | {"nodes": 1, "hours": 1.0}), error="")
        if verb == "test-settings":
            asked.append((words, data.decode()))
            said = "refused by the gate: no\x1b[2J" if refuses else ""
            return Answer(code=77 if refuses else 0, out="", error=said)
        return Answer(code=0, out="", error="")

    monkeypatch.setattr(gate, "send_to_gate", ask)
    rows = [row for row in gate.check_gate(federation, federation.facilities[0], link=False) if row.check == "policy"]
    assert asked == (
        [(("--dataset", "/data/it"), render(federation)["workflow/facilities/a.json"])] if version > 1 else []
    )
    assert [row.verdict for row in rows] == ["fail" if refuses and version > 1 else "ok"], rows
    assert not (refuses and version > 1) or ("refused by the gate: no" in rows[0].found and "\x1b" not in rows[0].found)
