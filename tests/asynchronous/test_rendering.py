"""Rendering a federation by groups: without `groups:` nothing changes, and invalid values are reported with a line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from coordinator.config.federation import read_federation
from coordinator.engine.queues import facility_of
from coordinator.engine.render import render, write
from facility.exchange.errors import ConfigurationError
from tests.federations import write_federation

GROUPS = {"bound": 3, "minimum": 2, "maximum": 0, "window_seconds": 300}
GOOD = """\
name: g
model: ../model
rounds: 3
facilities:
  - {name: a, dataset: ../a}
  - name: b
    dataset: ../b
groups: {window_seconds: 60}
"""


def test_every_facility_has_a_chain_of_its_own_that_stands_the_reference_runner(tmp_path: Path):
    path = write_federation(tmp_path, ["site-a.1", "b_2", "c"], groups=GROUPS)
    federation = read_federation(path)
    write(federation)
    steps = yaml.safe_load((tmp_path / "cwl" / "groups.cwl").read_text())["steps"]
    chains = {name for name, step in steps.items() if step["run"] == "chain.cwl"}
    assert chains == {"facility_site-a.1", "facility_b_2", "facility_c"}
    assert all("scatter" not in step for step in steps.values())
    for name in chains:
        assert steps[name]["requirements"]["cwltool:Loop"]["loopWhen"] == "$(inputs.proceed)"
    command = [Path(sys.executable).parent / "cwltool", "--enable-ext", "--validate", tmp_path / "cwl" / "groups.cwl"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and "is valid CWL" in result.stdout + result.stderr, result.stderr
    for text in [file.read_text() for file in (tmp_path / "cwl").rglob("*.cwl")]:
        assert "InlineJavascript" not in text and "${" not in text
        assert all(re.fullmatch(r"(self|inputs)(\[\d+\]|\.\w+)+", found) for found in re.findall(r"\$\((.*?)\)", text))


def test_training_is_bound_to_its_facility_and_told_from_the_coordinators_steps(tmp_path: Path):
    files = render(read_federation(write_federation(tmp_path, ["site-a.1", "b_2"], groups=GROUPS)))
    (workflow,) = yaml.safe_load(files["workflow/streamflow.yml"])["workflows"].values()
    assert workflow["config"]["file"] == "../cwl/groups.cwl"
    bound = {b["step"]: b["target"]["deployment"] for b in workflow["bindings"]}
    assert bound == {
        "/": "coordinator",
        "/facility_site-a.1/train": "facility-site-a.1",
        "/facility_b_2/train": "facility-b_2",
    }
    assert [facility_of(step) for step in bound] == ["", "site-a.1", "b_2"]
    assert [facility_of(step) for step in ("/rounds/train_site-a.1", "/rounds/receive_a", "/facility_a/meet")] == [
        "site-a.1",
        "",
        "",
    ]
    assert json.loads(files["workflow/coordinator.json"])["groups"] == GROUPS


def test_without_the_section_nothing_of_it_is_rendered(tmp_path: Path):
    federation = read_federation(write_federation(tmp_path, ["a", "b"]))
    files = render(federation)
    assert set(files) == {
        f"workflow/{n}"
        for n in ("streamflow.yml", "settings.yml", "coordinator.json", "facilities/a.json", "facilities/b.json")
    } | {"cwl/round.cwl"}
    assert "groups" not in json.loads(files["workflow/coordinator.json"])
    assert "file: ../cwl/main.cwl" in files["workflow/streamflow.yml"]
    write(federation)
    assert not (tmp_path / "cwl" / "chain.cwl").exists()


def test_defaults_are_told_by_the_section_alone(tmp_path: Path):
    path = tmp_path / "federation.yml"
    path.write_text(GOOD)
    groups = read_federation(path).groups
    assert groups is not None and (groups.bound, groups.minimum, groups.maximum, groups.window_seconds) == (
        3,
        2,
        0,
        60.0,
    )
    path.write_text(GOOD.replace("{window_seconds: 60}", "{}") + "aggregation: {rule: mean, weights: equal}\n")
    groups = read_federation(path).groups
    assert groups is not None and groups.window_seconds == 300


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        (
            "{window_seconds: 60}",
            "{window_second: 60}",
            8,
            "unknown key 'groups.window_second'; did you mean 'window_seconds'?",
        ),
        ("{window_seconds: 60}", "{window_seconds: -1}", 8, "window_seconds is -1, expected 0 or more"),
        ("{window_seconds: 60}", "{window_seconds: .inf}", 8, "window_seconds is inf, expected a finite number"),
        ("{window_seconds: 60}", "{bound: -1}", 8, "bound is -1, expected 0 or more"),
        ("{window_seconds: 60}", "{minimum: 3}", 8, "groups.minimum is 3, expected 1 to 2"),
        ("{window_seconds: 60}", "{minimum: 0}", 8, "minimum is 0, expected 1 or more"),
        ("{window_seconds: 60}", "{minimum: 1, maximum: 1}", 8, "maximum is 1, expected 0 (no limit) or 2 and more"),
        (
            "{window_seconds: 60}",
            "{minimum: 3, maximum: 2}",
            8,
            "maximum is 2, expected 0 (no limit) or at least minimum, 3",
        ),
        ("  - name: b\n    dataset: ../b\n", "", 6, "groups needs two facilities or more, found 1"),
        ("rounds: 3", "rounds: 3\nsending: {encoding: delta-int8}", 4, "sending.encoding is 'delta-int8'"),
        (
            "rounds: 3",
            "rounds: 3\naggregation:\n  rule: nesterov",
            5,
            "aggregation.rule is 'nesterov', expected 'mean' with groups",
        ),
        ("rounds: 3", "rounds: 3\naggregation: {rule: median}", 4, "aggregation.rule is 'median', expected 'mean'"),
        (
            "rounds: 3",
            "rounds: 3\naggregation: {clip_norm: 1.0}",
            4,
            "aggregation.clip_norm has no meaning with groups",
        ),
        (
            "rounds: 3",
            "rounds: 3\naggregation: {weights: samples}",
            4,
            "aggregation.weights is 'samples', expected tokens or equal",
        ),
        ("rounds: 3", "rounds: 3\nclaims: {action: cap}", 4, "claims.action is 'cap', expected 'refuse' or 'off'"),
        ("rounds: 3", "rounds: 3\nstop: {patience: 2}", 4, "stop.patience looks at rounds of all facilities"),
        ("rounds: 3", "rounds: 3\nfinal_evaluation: true", 4, "final_evaluation is true, but groups do not evaluate"),
        ("rounds: 3", "rounds: 3\ntraining: {lora: {rank: 4}}", 4, "facility 'a' trains adapters (lora.rank 4)"),
        ("    dataset: ../b", "    dataset: ../b\n    training: {lora: {rank: 4}}", 8, "facility 'b' trains adapters"),
    ],
)
def test_nonsense_is_one_error_with_its_line(tmp_path: Path, old: str, new: str, line: int, words: str):
    path = tmp_path / "federation.yml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigurationError) as caught:
        read_federation(path)
    assert words in str(caught.value) and caught.value.line == line, str(caught.value)
