"""Every key of federation.yml, changed while a federation lives, is listed or refused; none is passed over."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import yaml

from coordinator.config import federation as federation_module
from coordinator.config.described import describe_federation
from coordinator.config.federation import read_federation
from coordinator.config.reference import Key, keys
from coordinator.rounds.changes import RULES, changes_of
from facility.exchange.errors import ConfigurationError
from facility.exchange.text import KINDS
from tests.federations import write_federation

OTHERS: dict[str, Any] = {
    "rounds": 7,
    "minimum_facilities": 2,
    "rounds.count": 7,
    "rounds.deadline": "2099-01-01 00:00",
    "rounds.quorum": 1,
    "rounds.late": "drop",
    "rounds.steps": "fixed",
    "aggregation.rule": "median",
    "aggregation.weights": "equal",
    "aggregation.momentum": 0.3,
    "aggregation.parameters": {"own": 1},
    "privacy": {"secure_aggregation": True},
    "evaluation.tasks": ["arc_easy"],
    "evaluation.held_out": {"facility": "a", "dataset": "/held"},
    "facilities[].deployment.template": "leonardo",
    "facilities[].deployment.fill": {"account": "other", "partition": "other"},
    "facilities[].deployment.options": {"time": "09:00:00"},
    "facilities[].deployment.workdir": "/elsewhere",
    "facilities[].deployment.environment.home": "/elsewhere",
    "facilities[].deployment.environment.image": "/elsewhere.sif",
    "facilities[].deployment.firecrest.url": "https://firecrest.example.org",
    "facilities[].public.license": "mit",
    "facilities[].trainer.module": "own.trainer",
    "trainer.module": "own.trainer",
    "training.optimizer": "muon",
    "training.optimizer_parameters": {"momentum": 0.9},
    "training.encoding": "int8",
    "sending.encoding": "int8",
    "training.lora.rank": 4,
    "training.sync.policy": "local-sgd",
    "training.threads": 3,
    "pretrained": False,
    "facilities[].deployment.type": "pbs",
    "trackers": ["tensorboard"],
    "notify.command": ["true"],
    "notify.on": ["done"],
    "creators": [{"name": "Somebody"}],
    "license": "mit",
    "title": "Another",
}
"""Values where a plain one of the type would not do."""
CLOSING = {"count": 5, "quorum": 2, "grace": 3.0, "deadline": "2098-01-01", "steps": "auto"}
ELSEWHERE = {
    "name": "another federation, with an archive of its own",
    "archive": "another archive, with a history of its own",
    "facilities[].name": "one facility leaves and another joins",
}
"""Keys that are no change of this federation, and why."""
NESTED = re.compile(r"facilities\[\]\.")


def leaves() -> list[Key]:
    return [key for key in keys() if not key.section and key.path not in ELSEWHERE]


def other(key: Key, present: Any) -> Any:
    """A value that differs from the present one."""
    if key.path in OTHERS:
        return OTHERS[key.path]
    kind, default = key.type, key.default.strip("'\"`")
    if choice := re.search(r"one of (.*)", kind):
        words = [word for word in re.findall(r"'([^']+)'", choice[1]) if word not in (default, present, "auto")]
        if words:
            return words[0]
    if KINDS[bool] in kind or default in ("true", "false"):
        return default != "true"
    whole, fractional = KINDS[int] in kind, KINDS[float] in kind
    if whole or fractional:
        known = present if isinstance(present, int | float) else float(default) if re.match(r"-?[\d.]", default) else 1
        return int(known) + 1 if whole and not fractional else (known + 1) / 2 if known != 1 else 0.5
    if "list" in kind:
        return [["x"]] if "list of lists" in kind else ["x"]
    if "mapping" in kind:
        return {"x": 1}
    return "other"


def put(data: dict[str, Any], path: str, value: Any) -> None:
    steps = path.split(".")
    for step in steps[:-1]:
        under = data.get(step)
        data[step] = under = dict(under) if isinstance(under, dict) else {}
        data = under
    data[steps[-1]] = value


def changed(data: dict[str, Any], key: Key) -> dict[str, Any]:
    data = copy.deepcopy(data)
    if NESTED.match(key.path):
        put(data["facilities"][0], NESTED.sub("", key.path), other(key, None))
    elif key.path.startswith("rounds."):
        name = key.path.partition(".")[2]
        data["rounds"] = dict(CLOSING)
        data["rounds"][name] = other(key, data["rounds"].get(name))
    else:
        put(data, key.path.replace("[]", ""), other(key, data.get(key.path)))
    return data


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_federation(tmp_path_factory.mktemp("living"), ["a", "b", "c"], pretrained=True)
    data = yaml.safe_load(path.read_text())
    data["facilities"][0]["deployment"] = {
        "type": "slurm",
        "host": "login.example.org",
        "workdir": "/scratch/a",
        "template": "slurm",
        "fill": {"account": "one", "partition": "one"},
    }
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


class InMemory:
    """Stands for the file's text, whose parsing takes most of the time."""

    data: ClassVar[dict[str, Any]] = {}
    lines: ClassVar[dict[str, int]] = {}

    def __init__(self, file: Path) -> None:
        self.file = file

    def texts(self) -> list[tuple[str, str]]:
        return []

    def error(self, message: str, key: str) -> ConfigurationError:
        return ConfigurationError(message, key=key)


def read(path: Path, data: dict[str, Any]) -> dict[str, Any]:
    """As it is described. Raises `ConfigurationError`."""
    InMemory.data = data
    with mock.patch.object(federation_module, "Lined", InMemory):
        return describe_federation(read_federation(path))


def test_every_key_that_is_changed_is_listed_or_refused(federation: Path):
    plain = yaml.safe_load(federation.read_text())
    without, closing = read(federation, plain), read(federation, plain | {"rounds": CLOSING})
    silent, refused = [], []
    for key in leaves():
        before = closing if key.path.startswith("rounds.") else without
        try:
            if not changes_of(before, read(federation, changed(plain, key)), done=2):
                silent.append(key.path)
        except ConfigurationError:
            refused.append(key.path)
    assert silent == []
    assert len(refused) < len(leaves()) / 5, refused


def test_no_rule_is_of_a_key_that_does_not_exist(federation: Path):
    one = describe_federation(read_federation(federation))
    known = {*one["federation"], *one["facilities"]["a"], *(NESTED.sub("", key.path) for key in keys())}
    known |= {key.path.replace("rounds.", "closing.") for key in keys()} | {"limits.deadline", "even.steps"}
    known |= {"deployment.access", "deployment.job_script", "notify", "training.lora.rank"}
    assert [rule.pattern for rule in RULES if not any(re.fullmatch(rule.pattern, key) for key in known)] == []
