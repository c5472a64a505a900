"""A federation.yml with `groups:` of CrossFed 0.1 is read as rounds that do not wait, with the mapping in words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config.federation import Federation, read_federation
from coordinator.engine.render import render
from coordinator.preflight.check import check
from facility.exchange.errors import ConfigurationError
from tests.federations import write_federation

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


def read(root: Path, names: str = "abc", **changes: Any) -> Federation:
    return read_federation(write_federation(root, list(names), **changes))


def what_to_write(federation: Federation) -> dict[str, Any]:
    """Keys that the deprecation names, read as the YAML that a person copies."""
    found = re.findall(r"`(.*?)`", federation.deprecated)
    assert found, federation.deprecated
    return {key: value for one in found for key, value in yaml.safe_load(one).items()}


@pytest.mark.parametrize(
    "groups", [{}, {"minimum": 1, "window_seconds": 0}, {"bound": 1}, {"bound": 0}, {"minimum": 3, "bound": 5}]
)
@pytest.mark.parametrize("changes", [{}, {"aggregation": {"weights": "equal", "clip_norm": 1.0}}, {"keep_rounds": 5}])
def test_what_the_deprecation_says_is_what_the_section_means(
    tmp_path: Path, groups: dict[str, Any], changes: dict[str, Any]
):
    path = write_federation(tmp_path, list("abc"), groups=groups, **changes)
    before = read_federation(path)
    described = yaml.safe_load(path.read_text()) | what_to_write(before)
    del described["groups"]
    path.write_text(yaml.safe_dump(described, sort_keys=False))
    after = read_federation(path)
    assert after.deprecated == "" and render(after) == render(before)
    assert "groups" not in render(before)["workflow/coordinator.json"]


def test_a_group_is_a_round_that_closes_at_the_minimum_and_weighs_by_participation(tmp_path: Path):
    federation = read(tmp_path, groups={"minimum": 2, "window_seconds": 60, "bound": 3}, rounds=7)
    closing = federation.closing
    assert closing is not None and federation.rounds == 7
    assert (closing.quorum, closing.grace, closing.late, closing.late_weight) == (2, 60, "carry", "participation")
    assert federation.aggregation.rule == "mean" and federation.keep_rounds == 3 * 2 + 1
    assert read(tmp_path / "all", groups={"bound": 1}).closing is None, "every group was all of them"


def test_render_and_check_tell_what_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_federation(tmp_path, list("abc"), groups={"minimum": 2})
    result = CliRunner().invoke(app, ["render", "--federation", str(path)])
    assert result.exit_code == 0 and read_federation(path).deprecated in result.stdout
    monkeypatch.setattr("coordinator.preflight.check.check_here", lambda federation: ([], None))
    monkeypatch.setattr("coordinator.preflight.check.check_facility", lambda *_, **__: ([], None))
    rows = [row for row in check(path, link=False) if row.check == "deprecated"]
    assert [(row.verdict, row.found) for row in rows] == [("warning", read_federation(path).deprecated)]


def test_what_groups_could_not_do_rounds_can(tmp_path: Path):
    federation = read(
        tmp_path,
        groups={},
        aggregation={"rule": "heloco+nesterov"},
        sending={"encoding": "delta-int8"},
        stop={"patience": 2},
        training={"lora": {"rank": 4}},
    )
    assert federation.aggregation.rule == "heloco+nesterov" and federation.final_evaluation


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
        ("{window_seconds: 60}", "{bound: -1}", 8, "bound is -1, expected 0 or more"),
        ("{window_seconds: 60}", "{minimum: 3}", 8, "groups.minimum is 3, expected 1 to 2"),
        ("{window_seconds: 60}", "{maximum: 2}", 8, "a round has one model"),
        ("  - name: b\n    dataset: ../b\n", "", 6, "groups needs two facilities or more, found 1"),
        ("rounds: 3", "rounds: {count: 3}", 8, "rounds is a mapping and there are groups"),
        ("rounds: 3", "rounds: 0", 3, "count is 0, expected 1 or more"),
        (
            "groups: {window_seconds: 60}",
            "keep_rounds: 1\ngroups: {minimum: 1}",
            8,
            "rounds.late is 'carry' with keep_rounds 1",
        ),
        ("{window_seconds: 60}", "{minimum: 1}\nminimum_facilities: 2", 9, "such a round ends the run"),
        (
            "{window_seconds: 60}",
            "{minimum: 1}\naggregation: {rule: mean, lora: product}",
            9,
            "'product' with rounds.late 'carry'",
        ),
    ],
)
def test_what_has_no_counterpart_is_one_error_with_its_line(tmp_path: Path, old: str, new: str, line: int, words: str):
    path = tmp_path / "federation.yml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigurationError) as caught:
        read_federation(path)
    assert words in str(caught.value) and caught.value.line == line, str(caught.value)
