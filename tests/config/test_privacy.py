"""`privacy:`: what cannot go together is refused with its reason; without it not a byte of the rendering changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.config.federation import read_federation
from coordinator.engine.render import render
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.settings import read_facility_settings

SHARED = {"export_dtype": "float32", "signing_key": "k", "optimizer_state": "shared"}


def described(**changes: Any) -> dict[str, Any]:
    return {
        "name": "f",
        "model": "model",
        "rounds": 2,
        "aggregation": {"allowed_signers": "signers"},
        "training": {"export_dtype": "float32", "signing_key": "~/.ssh/id"},
        "privacy": {"secure_aggregation": True, "peer_signers": "~/peers"},
        "facilities": [{"name": name, "dataset": "d"} for name in ("a", "b", "c")],
    } | changes


def unlike(**training: Any) -> list[dict[str, Any]]:
    """Three facilities, the last of which trains otherwise."""
    return [{"name": name, "dataset": "d"} for name in "ab"] + [{"name": "c", "dataset": "d", "training": training}]


def read(tmp_path: Path, content: dict[str, Any]):
    path = tmp_path / "workflow" / "federation.yml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return read_federation(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"facilities": [{"name": n, "dataset": "d"} for n in "ab"]}, "each can subtract its own"),
        ({"privacy": {"secure_aggregation": True, "peer_signers": "p", "threshold": 4}}, "expected 2 to 3"),
        ({"privacy": {"secure_aggregation": True}}, "put its own keys in between"),
        ({"privacy": {"peer_signers": "p", "threshold": 3}}, "peer_signers is of secure aggregation, which is off"),
        ({"privacy": {"secure_aggregation": True, "peer_signers": "p", "minimum_sum": 4}}, "at most the 3 facilities"),
        ({"aggregation": {"rule": "median", "allowed_signers": "s"}}, "compares single updates"),
        ({"aggregation": {"rule": "krum", "allowed_signers": "s"}}, "compares single updates"),
        ({"aggregation": {"rule": "ties", "allowed_signers": "s"}}, "compares single updates"),
        ({"aggregation": {"screen": {"action": "quarantine"}, "allowed_signers": "s"}}, "norms and cosines"),
        ({"aggregation": {"clip_norm": 1.0, "allowed_signers": "s"}}, "set privacy.clip_norm"),
        ({"aggregation": {"clip_ratio": 2.0, "allowed_signers": "s"}}, "set privacy.clip_norm"),
        ({"aggregation": {"rule": "mean", "lora": "product", "allowed_signers": "s"}}, "multiplies single updates"),
        ({"aggregation": {"weights": {"a": 1}, "allowed_signers": "s"}}, "each facility weighs itself"),
        ({"aggregation": {"maximum_staleness": 1, "allowed_signers": "s"}}, "masks do not cancel"),
        ({"aggregation": {}}, "allowed_signers is empty"),
        ({"training": {"export_dtype": "float32", "signing_key": "k", "encoding": "delta-int8"}}, "not of codes"),
        ({"training": {"signing_key": "k"}}, "expected 'float32'"),
        ({"training": {"export_dtype": "float32"}}, "signing_key of 'a' is empty"),
        (
            {"training": SHARED | {"optimizer_state_form": "int8"}},
            "optimizer_state_form of 'a' is 'int8': .* expected 'factors'",
        ),
        (
            {"training": SHARED | {"optimizer": "muon"}},
            "optimizer of 'a' is 'muon', which keeps second moments of some",
        ),
        ({"training": SHARED | {"clip_norm": 0}}, "clip_norm of 'a' is 0: .* has to be known before a round"),
        ({"training": SHARED | {"clip_norm": 50}}, "off by up to 2.9e-08, more than epsilon .* expected at most 17 "),
        (
            {"training": {"export_dtype": "float32", "signing_key": "k", "first_moments": "mean"}},
            "first_moments of 'a' is 'mean': .* not built",
        ),
        (
            {"training": {"export_dtype": "float32", "signing_key": "k", "sync": {"policy": "diloco"}}},
            "known only after the round",
        ),
        ({"sending": {"encoding": "delta-int8"}}, "expected 'full'"),
        ({"facilities": unlike(learning_rate=1e-9)}, "training.learning_rate differs between 'a' and 'c'"),
        ({"facilities": unlike(steps=1, batch_sequences=1)}, "800 sequences .* at 'a' and 1 at 'c'"),
        ({"groups": {"minimum": 2}, "aggregation": {"allowed_signers": "s"}}, "masks cancel in the sum of one round"),
    ],
)
def test_what_cannot_go_together_is_refused_with_the_reason(tmp_path: Path, changes: dict[str, Any], words: str):
    with pytest.raises(ConfigurationError, match=words) as caught:
        read(tmp_path, described(**changes))
    assert caught.value.line is not None


@pytest.mark.parametrize("rule", ["mean", "nesterov", "fedadam", "fedyogi", "fedadagrad", "fedavgm", "slowmo"])
def test_the_mean_and_every_server_optimizer_are_allowed(tmp_path: Path, rule: str):
    federation = read(tmp_path, described(aggregation={"rule": rule, "allowed_signers": "signers"}))
    assert federation.masks is not None


@pytest.mark.parametrize(
    ("training", "state"),
    [({}, "shared"), ({"clip_norm": 0}, "personal"), ({"optimizer_state_form": "full"}, "personal")],
)
def test_automatic_second_moments_are_shared_as_without_masks_where_they_can_be_masked(
    tmp_path: Path, training: dict[str, Any], state: str
):
    """Both sides get the same range and rounds, and nothing where moments are personal."""
    keys = {"export_dtype": "float32", "signing_key": "k", "optimizer_state_every": 2} | training
    masked = read(tmp_path, described(training=keys))
    assert {one.training.optimizer_state for one in masked.facilities} == {state}
    plain = {key: value for key, value in described(training=keys).items() if key != "privacy"}
    assert {one.training.optimizer_state for one in read(tmp_path, plain).facilities} == {"shared"}
    files = {name: json.loads(text) for name, text in render(masked).items() if name.endswith(".json")}
    sent = files["workflow/facilities/a.json"]["masking"].get("moments")
    assert sent == files["workflow/coordinator.json"].get("masked_moments")
    assert sent == ({"range": 1.0, "every": 2} if state == "shared" else None)


@pytest.mark.parametrize(("count", "threshold", "least"), [(3, 2, 3), (4, 3, 3), (5, 3, 4), (8, 5, 3)])
def test_the_automatic_threshold_is_the_least_above_half(tmp_path: Path, count: int, threshold: int, least: int):
    names = [f"f{number}" for number in range(count)]
    federation = read(tmp_path, described(facilities=[{"name": name, "dataset": "d"} for name in names]))
    files = render(federation)
    settings = json.loads(files["workflow/facilities/f0.json"])
    assert settings["masking"]["threshold"] == threshold and settings["masking"]["facilities"] == names
    assert settings["masking"]["minimum_sum"] == least
    (tmp_path / "settings.json").write_text(files["workflow/facilities/f0.json"])
    read_settings = read_facility_settings(tmp_path / "settings.json").masking
    assert read_settings is not None and read_settings.threshold == threshold


def test_the_workflow_has_its_steps_only_where_the_setting_is_on(tmp_path: Path):
    on = yaml.safe_load(render(read(tmp_path, described()))["cwl/round.cwl"])["steps"]
    assert {name for name in on if name.endswith("_a")} == {"keys_a", "train_a", "receive_a", "unmask_a"}
    assert {"roster", "survivors", "aggregate"} < set(on)
    off = described()
    bare = render(read(tmp_path, {key: value for key, value in off.items() if key != "privacy"}))
    switched_off = render(read(tmp_path, off | {"privacy": {"secure_aggregation": False, "threshold": 3}}))
    assert set(bare) == set(switched_off)
    assert all(bare[name] == switched_off[name] for name in bare if name != "workflow/coordinator.json")
    for name, text in bare.items():  # coordinator.json also records federation.yml with all its defaults
        text = " ".join(json.loads(text)) if name == "workflow/coordinator.json" else text
        assert not any(word in text for word in ("privacy", "masking", "unmask", "largest_step", "peer_signers"))


def test_commands_of_the_login_node_are_bound_to_it_and_not_to_the_queue(tmp_path: Path):
    content = described()
    content["facilities"][0]["deployment"] = {
        "type": "slurm",
        "host": "login.a",
        "workdir": "/scratch/x",
        "template": "slurm",
        "fill": {"account": "p", "partition": "q"},
    }
    content["facilities"][1]["deployment"] = {"type": "ssh", "host": "host.b", "workdir": "/scratch/y"}
    files = render(read(tmp_path, content))
    told = yaml.safe_load(files["workflow/streamflow.yml"])
    targets = {one["step"]: one["target"] for one in told["workflows"]["f"]["bindings"]}
    assert targets["/rounds/unmask_a"] == {"deployment": "facility-a-ssh", "service": "login"}
    assert targets["/rounds/keys_b"] == {"deployment": "facility-b", "service": "login"}
    assert targets["/rounds/keys_c"] == {"deployment": "facility-c"}
    assert told["deployments"]["facility-a-ssh"]["config"]["services"] == {"login": "jobs/a-login.sh"}
    assert set(told["deployments"]["facility-b"]["config"]["services"]) == {"train", "login"}
    assert files["workflow/jobs/a-login.sh"].startswith("#!/bin/bash\n")
    assert '. "$HOME"/' in files["workflow/jobs/a-login.sh"] or ". ''" in files["workflow/jobs/a-login.sh"]
