"""Policies are known by what they declare, and a policy from outside the package trains by its dotted path."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.simulation.replicas import simulate_policy
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.emulation import Emulation
from facility.exchange.messages.plan import Sync
from facility.exchange.messages.sync import SyncSettings, describe_policies
from facility.exchange.schedules.registry import SCHEDULES
from facility.exchange.scheduling.policies import POLICIES
from tests.simulation.plain_steps import plain_steps
from tests.sync.fleet import run_fleet, settings_of
from tests.sync.quadratic import solve, target

OWN = "tests.sync.outside_policy:SparseAverage"


@pytest.mark.slow
def test_two_processes_train_under_a_policy_from_outside_the_package():
    results = run_fleet(solve, 2, settings_of(policy=OWN, parameters={"interval": 3}), 9)
    assert results[0]["vector"] == results[1]["vector"]
    assert results[0]["report"]["policy"] == OWN and results[0]["report"]["groups"] == 4  # three and the last
    centre = ((target(0) + target(1)) / 2).mean().item()
    alone = [abs(sum(r["local"]) / len(r["local"]) - centre) for r in results]
    assert max(alone) < 0.5, "averages after every third step hold both near the middle"


def test_the_simulator_runs_it_too():
    result = simulate_policy(SyncSettings(policy=OWN), 2, plain_steps(Emulation(), 0.5, 0.5), steps=10)
    assert result.updates == 20 and result.seconds == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"policy": "partial_redcue"}, "partial_redcue.*expected one of adpsgd, .*Did you mean 'partial_reduce'"),
        ({"policy": "nowhere.at_all:Policy"}, "nowhere.at_all"),
        ({"policy": OWN, "parameters": {"interval": 0}}, "interval is 0, expected a whole number of at least 1"),
        ({"policy": OWN, "parameters": {"intervall": 3}}, "intervall is unknown .*'interval'"),
        ({"policy": "local", "parameters": {"interval": 3}}, "interval is unknown to local"),
    ],
)
def test_what_is_unknown_is_refused_with_what_is_known(keys: dict, message: str):
    with pytest.raises(ConfigurationError, match=message):
        SyncSettings(**keys)


def test_a_plan_names_registered_policies_only():
    with pytest.raises(ConfigurationError, match="expected one of"):
        Sync(name="allredcue")


def test_policies_and_schedules_are_known_without_torch():
    code = (
        "import sys; from facility.exchange.messages.settings import TrainingSettings;"
        "from facility.exchange.scheduling.policies import POLICIES;"
        "from facility.exchange.schedules.registry import SCHEDULES;"
        "POLICIES.describe(); SCHEDULES.describe(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


@pytest.mark.parametrize("registry", [POLICIES, SCHEDULES], ids=["policies", "schedules"])
def test_what_is_read_from_a_file_is_what_it_declares(registry):
    for name, entry in registry.built_in.items():
        module = importlib.import_module(entry.module)
        assert entry == type(entry)(**(vars(module.DECLARATION) | {"module": module.__name__})), name
        assert callable(registry.load(name)) and entry.summary and entry.citation


def test_every_parameter_of_a_policy_is_documented_with_its_default():
    described = {entry["name"]: entry for entry in describe_policies()}
    assert set(described) == set(POLICIES.names())
    every = {p["name"]: p for p in described["diloco"]["parameters"]}
    assert every["outer_momentum"]["default"] == 0.9 and "Nesterov" in every["outer_momentum"]["text"]
    assert all(p["text"] for entry in described.values() for p in entry["parameters"])
