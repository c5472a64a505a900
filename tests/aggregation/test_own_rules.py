"""Rules and server optimizers from outside the package: by dotted path and by entry point, through the command."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from coordinator.aggregation.rule_parameters import declared
from coordinator.aggregation.rules import mean
from coordinator.aggregation.rules.contract import MOMENTUM, Plan
from coordinator.aggregation.rules.registry import RULES
from coordinator.aggregation.server_optimizers.contract import Step
from coordinator.aggregation.server_optimizers.kept_arguments import with_kept_arguments
from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS
from coordinator.aggregation.settings import AggregationSettings
from facility.exchange.errors import ConfigurationError, InputError
from tests.aggregation import make
from tests.aggregation.make import aggregate
from tests.conftest import ROOT
from tests.distributed import Started, help_of

PAGE = ROOT / "docs" / "how-to" / "write-a-rule.md"
RULE = '''
"""Midrange: half way between the smallest and the largest value."""
from coordinator.aggregation.rules.contract import AggregationRule, Plan
from facility.exchange.registry import Parameter

DECLARATION = AggregationRule(
    name="midrange",
    summary="half way between the extremes",
    citation="Nobody 1900",
    implementation="plan",
    parameters=(Parameter(name="lean", default=0.5, at_least=0, at_most=1, text="0: the smallest, 1: the largest."),),
    needs=("sorted_values",),
)


def plan(updates, *, lean):
    return Plan(
        combine=lambda ordered, tensor, offset: (1 - lean) * ordered[0] + lean * ordered[-1],
        details={"leaning": lean, "of": list(updates.facilities)},
    )
'''
UNDECIDED = '''
"""Decides as little as it is told to."""
from coordinator.aggregation.rules.contract import AggregationRule, Plan
from facility.exchange.registry import Parameter

DECLARATION = AggregationRule(
    name="undecided", implementation="plan", parameters=(Parameter(name="how", default="nothing"),)
)


def plan(updates, *, how):
    return Plan(tensor_coefficients=lambda tensor: None) if how == "no tensor" else Plan()
'''
OPTIMIZER = '''
"""Moves the master by the sign of the step."""
from coordinator.aggregation.server_optimizers.contract import ServerOptimizer
from facility.exchange.registry import Parameter

DECLARATION = ServerOptimizer(
    name="signs",
    implementation="build",
    parameters=(Parameter(name="size", default=1.0, above=0),),
    slots=("turns",),
)


def build(round, *, size):
    return (lambda master, step, slots: (master + size * (step > 0) - size * (step < 0), [slots[0] + 1])), (0.0,)
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on Python's path with a package of a rule and an optimizer, the rule also an entry point `midrange`."""
    folder = tmp_path / "outside"
    (folder / "my_package").mkdir(parents=True)
    (folder / "my_package" / "__init__.py").write_text("")
    (folder / "my_package" / "my_rule.py").write_text(RULE)
    (folder / "my_package" / "undecided.py").write_text(UNDECIDED)
    (folder / "my_package" / "signs.py").write_text(OPTIMIZER)
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[crossfed.aggregation_rules]\nmidrange = my_package.my_rule:plan\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}")
    return folder


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """`python -m coordinator.aggregate` of steps 1, 2 and 6 from a base of zero."""
    base = make.model(tmp_path / "base", {"w": torch.zeros(4)})
    updates = [
        make.update(tmp_path / f"u{step}", {"w": torch.full((4,), float(step))}, base=base, facility=f"f{step}")
        for step in (1, 2, 6)
    ]
    words = [sys.executable, "-m", "coordinator.aggregate", "--base", str(base)]
    return words + [word for update in updates for word in ("--update", str(update))]


def forked(command: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """What becomes of the command in a fork, which has this process's environment and Python's path from there."""
    return Started(command[2], command[3:], tmp_path / "said", dict(os.environ), directory=tmp_path).ended()


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of docs/how-to/write-a-rule.md on Python's path, each in the file that its first line names."""
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        file = tmp_path / "page" / re.match(r'"""(\S+\.py):', block)[1]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'page'}{os.pathsep}{os.environ['PYTHONPATH']}")


@pytest.mark.parametrize(("number", "expected"), [(0, 3.5), (1, 0.001)], ids=["rule", "server optimizer"])
def test_the_rules_of_the_documentation_aggregate(
    page: None, command: list[str], tmp_path: Path, number: int, expected: float
):
    settings = yaml.safe_load(re.findall(r"```yaml\naggregation:\n(.*?)```", PAGE.read_text(), re.S)[number])
    words = ["--rule", settings.pop("rule")]
    (tmp_path / "settings.yml").write_text(yaml.safe_dump(settings | {"clip_ratio": 0}))
    words += ["--settings", str(tmp_path / "settings.yml"), "--out", str(tmp_path / "out")]
    done = subprocess.run([*command, *words, "--state-out", str(tmp_path / "state")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert torch.allclose(make.read_all(tmp_path / "out")["w"], torch.full((4,), expected), rtol=1e-3)


@pytest.mark.parametrize(
    ("rule", "settings", "expected"),
    [
        ("my_package.my_rule", "{clip_ratio: 0}", 3.5),
        pytest.param("my_package.my_rule:plan", "{parameters: {lean: 0}}", 1.0, marks=pytest.mark.slow),
        ("midrange", "{clip_ratio: 0, parameters: {lean: 1}}", 6.0),
        ("midrange+my_package.signs", "{parameters: {size: 0.25}}", 0.25),
        pytest.param("my_package.signs+median", "{}", 1.0, marks=pytest.mark.slow),
    ],
)
def test_a_rule_from_outside_aggregates(
    outside: Path, command: list[str], tmp_path: Path, rule: str, settings: str, expected: float
):
    (tmp_path / "settings.yml").write_text(settings)
    words = ["--rule", rule, "--settings", str(tmp_path / "settings.yml"), "--out", str(tmp_path / "out")]
    done = forked([*command, *words, "--state-out", str(tmp_path / "state")], tmp_path)
    assert done.returncode == 0, done.stderr
    assert make.read_all(tmp_path / "out")["w"].tolist() == [expected] * 4
    assert (tmp_path / "state" / "turns").exists() == ("signs" in rule)
    record = make.read_json(tmp_path / "state" / "round.json")
    assert record["rule"] == rule
    if "midrange" in record["combiner"] or "my_rule" in record["combiner"]:
        assert record["details"]["of"] == ["f1", "f2", "f6"]


@pytest.mark.parametrize(
    ("rule", "settings", "words"),
    [
        ("my_package.my_rule", "{parameters: {lean: 2}}", "lean is 2.0, expected a number of at least 0"),
        ("my_package.my_rule", "{parameters: {leen: 1}}", "parameters.leen is unknown to my_package.my_rule.* lean"),
        ("my_package.undecided", "{}", "my_package.undecided returned Plan.*expected a Plan with coefficients"),
        (
            "my_package.undecided",
            "{parameters: {how: no tensor}}",
            "neither coefficients nor a function for tensor 'w'",
        ),
        (
            "my_package.my_rul",
            "{}",
            "neither a module with a DECLARATION nor an object 'my_rul'. Did you mean 'my_rule'",
        ),
        ("no_package.at_all", "{}", "no_package cannot be found"),
        ("midrangee", "{}", "expected one of bulyan, .*midrange, one of fedadagrad, "),
    ],
)
def test_what_cannot_be_used_is_one_clear_error(
    outside: Path, command: list[str], tmp_path: Path, rule: str, settings: str, words: str
):
    (tmp_path / "settings.yml").write_text(settings)
    arguments = ["--rule", rule, "--settings", str(tmp_path / "settings.yml"), "--out", str(tmp_path / "out")]
    done = forked([*command, *arguments], tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    with pytest.raises(ConfigurationError, match=words):
        raise ConfigurationError(done.stderr)
    assert not (tmp_path / "out").exists()


def test_an_optimizer_that_works_in_place_is_one_clear_error(outside: Path, command: list[str], tmp_path: Path):
    """In the first round as well, whose master no file holds: it would be moved and counted as not moved."""
    text = OPTIMIZER.replace("master + size * (step > 0)", "np.add(master, step, out=master)")
    (outside / "my_package" / "signs.py").write_text("import numpy as np\n" + text)
    arguments = ["--rule", "mean+my_package.signs", "--out", str(tmp_path / "out")]
    done = forked([*command, *arguments], tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "the server optimizer my_package.signs changes its arguments in place" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda master, step, slots: (master, [np.multiply(slots[0], 2, out=slots[0])]), "in place"),
        (lambda master, step, slots: master + step, r"returns ndarray of shape \(4,\), expected .* its 1 slots"),
        (lambda master, step, slots: (master + step, []), r"returns \(ndarray of shape \(4,\), \(\)\), expected"),
        (lambda master, step, slots: (master[:1], slots), r"shape \(1,\), .* of the arguments' shape \(4,\)"),
        (lambda master, step, slots: (1.0, slots), r"returns \(float, .*expected"),
    ],
)
def test_what_an_optimizer_changes_or_returns_is_held_to_its_contract(step: Step, words: str):
    with pytest.raises(InputError, match=f"the server optimizer odd .*{words}"):
        with_kept_arguments("odd", step)(np.ones(4, np.float32), np.ones(4, np.float32), [np.ones(4, np.float32)])


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(coefficients=[1.0]), r"coefficients \[1.0\], expected 2 finite numbers"),
        (Plan(coefficients=[0.5, math.nan]), "expected 2 finite numbers"),
        (Plan(coefficients=["a", "b"]), "expected 2 finite numbers"),  # type: ignore[list-item]
        (Plan(tensor_coefficients=lambda tensor: [1.0] * 3), "for tensor 'w', expected 2 finite numbers"),
        (Plan(combine=lambda steps, tensor, offset: steps[0, :1]), r"shape \(1,\).*expected a numpy array of 4"),
        (Plan(combine=lambda steps, tensor, offset: steps), r"shape \(2, 4\).*expected a numpy array of 4"),
        (Plan(combine=lambda steps, tensor, offset: list(steps[0])), "expected a numpy array of 4"),
        (Plan(combine=lambda steps, tensor, offset: steps[0] > 0), "dtype bool; expected a numpy array of 4"),
        (Plan(coefficients=[0.5, 0.5], details={"largest": np.float32(1)}), "details that round.json cannot hold"),
    ],
)
def test_what_a_rule_decides_is_held_to_its_contract(
    plan: Plan, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One value for all of a tensor would be taken for each of them, and the model written."""
    monkeypatch.setattr(mean, "plan", lambda updates: plan)
    base = make.model(tmp_path / "base", {"w": torch.zeros(4)})
    updates = [make.update(tmp_path / who, {"w": torch.ones(4)}, base=base, facility=who) for who in "ab"]
    with pytest.raises(InputError, match=f"the rule mean .*{words}"):
        aggregate(base=base, updates=updates, out=tmp_path / "out", settings=AggregationSettings(rule="mean"))
    assert not (tmp_path / "out").exists()


def test_arguments_may_be_returned_as_they_are():
    master, slot = np.ones(4, np.float32), np.zeros(4, np.float32)
    after, slots = with_kept_arguments("even", lambda master, step, slots: (master, list(slots)))(master, slot, [slot])
    assert after is master and slots[0] is slot


def test_help_and_documentation_follow_from_the_registry(outside: Path, tmp_path: Path):
    shown = " ".join(help_of("coordinator.aggregate", tmp_path / "said").split())
    assert all(name in shown for name in (*RULES.names(), *SERVER_OPTIMIZERS.names(), "midrange"))
    for registry in (RULES, SERVER_OPTIMIZERS):
        for entry in registry.describe():
            assert entry["summary"] and entry["citation"], entry
            assert all(parameter["text"] for parameter in entry["parameters"]), entry
            with_momentum = MOMENTUM in getattr(registry.get(entry["name"]), "needs", ())
            settings = AggregationSettings(rule=entry["name"] + ("+nesterov" if with_momentum else ""))
            values = settings.values_of(registry.get(entry["name"]))
            assert values == {parameter["name"]: parameter["default"] for parameter in entry["parameters"]}
            registry.load(entry["name"])


@pytest.mark.parametrize("name", sorted(declared()))
def test_a_parameter_of_several_rules_is_one_setting_with_defaults_of_its_own(name: str):
    """One key stands for all, so that they may differ in nothing but the default."""
    first, *others = declared()[name].values()
    assert all(dataclasses.replace(other, default=first.default) == first for other in others)


def test_parameters_of_shipped_rules_stand_beside_the_rule():
    assert AggregationSettings(rule="krum", byzantine=2).values_of(RULES.get("krum")) == {"byzantine": 2}
    for wrong in ({"trim": 0.5}, {"density": 0.0}, {"byzantine": -1}, {"iterations": 0}, {"beta2": 1.0}, {"tau": 0.0}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            AggregationSettings(**wrong)
