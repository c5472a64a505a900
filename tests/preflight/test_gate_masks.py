"""What `crossfed check` says of secure aggregation behind a gate, from what the gate told of its policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.config.federation import read_federation
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

    monkeypatch.setattr(gate, "ask", ask)
    federation = read_federation(file)
    rows = [row for row in gate.check_gate(federation, federation.facilities[0], link=False) if row.check == "policy"]
    assert [(row.verdict, words in row.found) for row in rows] == [(verdict, True)], rows
