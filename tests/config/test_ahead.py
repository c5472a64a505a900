"""`submit_ahead` is taken where a job can be handed its round, and refused elsewhere with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.config.ahead import AheadSettings
from coordinator.config.federation import read_federation
from coordinator.config.firecrest import FirecrestAccess
from coordinator.engine.render import render
from coordinator.rounds.changes import RULES
from facility.exchange.errors import ConfigurationError

SLURM = {"type": "slurm", "host": "login", "workdir": "/w", "template": "slurm"} | {
    "fill": {"account": "x", "partition": "y"}
}
GATE = {"type": "slurm", "host": "login", "workdir": "/w", "gate": True}
FIRECREST = {"url": "https://f7t", "system": "s", "token_url": "https://t", "client_id": "c"}
API = {"type": "firecrest", "workdir": "/w", "template": "slurm", "fill": {"account": "x", "partition": "y"}} | {
    "firecrest": FIRECREST | {"client_secret_file": "f"}
}


def write(folder: Path, deployments: dict[str, Any], top: Any = None, own: dict[str, Any] | None = None) -> Path:
    facilities = [
        {"name": name, "dataset": "/d", "deployment": one}
        | ({"submit_ahead": (own or {})[name]} if name in (own or {}) else {})
        for name, one in deployments.items()
    ]
    content = {"name": "f", "model": "m", "rounds": 3, "facilities": facilities}
    file = folder / "federation.yml"
    file.write_text(yaml.safe_dump(content | ({"submit_ahead": top} if top is not None else {})))
    return file


@pytest.mark.parametrize(
    ("top", "own", "expected"),
    [
        (None, {}, {}),
        (False, {}, {}),
        (True, {}, {"a": AheadSettings(), "b": AheadSettings()}),
        ({"wait": 0, "then": "leave"}, {"b": False}, {"a": AheadSettings(wait=0, then="leave")}),
        (None, {"b": {"idle": 0.2}}, {"b": AheadSettings(idle=0.2)}),
        ({"wait": 9}, {"b": True}, {"a": AheadSettings(wait=9), "b": AheadSettings()}),
    ],
)
def test_a_facility_follows_the_federation_unless_it_says_otherwise(tmp_path, top, own, expected):
    federation = read_federation(write(tmp_path, {"a": SLURM, "b": SLURM, "c": {"type": "local"}}, top, own))
    assert federation.ahead == expected
    told = json.loads(next(text for name, text in render(federation).items() if name.endswith("coordinator.json")))
    assert set(told.get("ahead", {})) == set(expected)


@pytest.mark.parametrize(
    ("deployments", "top", "own", "said"),
    [
        ({"a": SLURM, "b": API}, True, {}, "set `submit_ahead: false` at facility 'b'"),
        ({"a": SLURM, "b": API}, None, {"b": True}, "remove it"),
        ({"a": API}, True, {}, "FirecREST gives no command"),
        ({"a": {"type": "local"}}, True, {}, "no facility that uses it has a queue"),
        ({"a": {"type": "local"}}, None, {"a": True}, "without a queue"),
        ({"a": SLURM}, {"wait": -1}, {}, "submit_ahead.wait is -1"),
        ({"a": SLURM}, {"idle": 0}, {}, "submit_ahead.idle is 0"),
        ({"a": SLURM}, {"then": "stay"}, {}, "expected one of 'again', 'leave'"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(tmp_path, deployments, top, own, said):
    with pytest.raises(ConfigurationError, match="federation.yml:") as raised:
        read_federation(write(tmp_path, deployments, top, own))
    assert said in str(raised.value)


def test_a_gate_beside_a_queue_is_left_out_by_its_own_word(tmp_path):
    assert set(read_federation(write(tmp_path, {"a": SLURM, "b": GATE}, True, {"b": False})).ahead) == {"a"}


def test_it_can_be_changed_while_a_federation_lives():
    import re

    rule = next(one for one in RULES if re.fullmatch(one.pattern, "submit_ahead.wait"))
    assert not rule.affects


@pytest.mark.parametrize(
    ("address", "taken"),
    [
        ("https://api.example.org/v2", True),
        ("http://localhost:8000/v2", True),
        ("http://127.0.0.1:8000", True),
        ("http://[::1]:8000/v2", True),
        ("http://localhost.example.org/v2", False),
        ("http://127.0.0.1.example.org/v2", False),
        ("http://localhost@example.org/v2", False),
        ("http://localhost:x@example.org", False),
        ("http://api.example.org", False),
        ("https://a@example.org", False),
        ("https://", False),
    ],
)
@pytest.mark.parametrize("key", ["url", "token_url"])
def test_the_secret_goes_to_an_encrypted_address_or_to_this_machine(key: str, address: str, taken: bool):
    values = FIRECREST | {"client_secret_file": "f", key: address}
    if taken:
        assert getattr(FirecrestAccess(**values), key) == address
    else:
        with pytest.raises(ConfigurationError, match=f"{key} is .*, expected an https:// address"):
            FirecrestAccess(**values)
