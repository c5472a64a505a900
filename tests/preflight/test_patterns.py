"""Laws: a pattern that means no tensor is told; patterns that leave nothing to average end a run before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.config.federation import read_federation
from coordinator.preflight.fitting import check_fitting
from coordinator.preflight.patterns import check_patterns
from coordinator.preflight.row import Row
from facility.exchange.exit_codes import ExitCode
from tests.federations import write_federation
from tests.training.federation import write_settings
from tests.training.layouts import run_rounds


def rows_of(root: Path, **changes: Any) -> list[Row]:
    return check_patterns(read_federation(write_federation(root, ["a", "b"], **changes)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"aggregation": {"exclude": ["*embed_token.*"]}}, "aggregation.exclude: '*embed_token.*' matches no tensor"),
        ({"aggregation": {"include": ["model.*", "head.*"]}}, "aggregation.include: 'head.*' matches no tensor"),
        ({"training": {"freeze": ["model.layer.0.*"]}}, "training.freeze of a: 'model.layer.0.*' matches no tensor"),
        ({"training": {"lora": {"rank": 2}}, "aggregation": {"exclude": ["*lora_C*"]}}, "'*lora_C*' matches no tensor"),
    ],
)
def test_a_pattern_that_means_no_tensor_is_told(tmp_path: Path, changes: dict[str, Any], words: str):
    rows = rows_of(tmp_path, **changes)
    assert {row.verdict for row in rows} == {"warning"} and words in rows[0].found and "such as" in rows[0].fix
    assert ("is sent" in rows[0].fix) == ("exclude" in words or "lora_C" in words)


@pytest.mark.parametrize(
    "changes",
    [
        {"aggregation": {"exclude": ["*embed_tokens*"]}},
        {"aggregation": {"include": ["*layers*"]}, "training": {"freeze": ["model.norm.weight"]}},
        {"aggregation": {"exclude": ["*lora_A*"]}, "training": {"lora": {"rank": 2}}},
    ],
)
def test_patterns_that_mean_some_are_well(tmp_path: Path, changes: dict[str, Any]):
    assert [row.verdict for row in rows_of(tmp_path, **changes)] == ["ok"]


def test_without_patterns_nothing_is_said(tmp_path: Path):
    assert rows_of(tmp_path) == []


@pytest.mark.parametrize("aggregation", [{"exclude": ["*"]}, {"include": ["nothing.*"]}])
def test_patterns_that_leave_nothing_to_average_end_a_run_before_it_begins(tmp_path: Path, aggregation: dict[str, Any]):
    federation = read_federation(write_federation(tmp_path, ["a"], aggregation=aggregation))
    assert "leave no tensor to average" in [row.found for row in check_fitting(federation) if row.verdict == "fail"][0]


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 2}}])
@pytest.mark.parametrize(
    ("freeze", "fails"),
    [(["*"], True), (["model.*", "lm_head.*"], True), (["*norm*"], False), ([], False)],
)
def test_what_leaves_nothing_to_train_ends_a_run_before_a_job_finds_out(
    tmp_path: Path, lora: dict[str, Any], freeze: list[str], fails: bool
):
    rows = rows_of(tmp_path, training={"freeze": freeze} | lora)
    found = [row.found.partition(",")[0] for row in rows if row.verdict == "fail"]
    assert found == ([f"training.freeze of {name} leaves no parameter to train" for name in "ab"] if fails else [])


@pytest.mark.parametrize("freeze", ["*layers.0*", "*lora_A*", "lm_head*"])
def test_a_frozen_part_of_the_adapters_is_refused_where_the_next_round_would_lack_it(tmp_path: Path, freeze: str):
    """As the trainer refuses it, in the same words; what adapters leave as it is may be named."""
    lora = {"rank": 2, "modules_to_save": ["lm_head"]}
    row, other = rows_of(tmp_path, training={"freeze": [freeze], "lora": lora})
    assert (row.verdict, other.verdict) == ("fail", "fail") and "of the adapters, such as" in row.found
    settings = write_settings(tmp_path / "settings.json", freeze=[freeze], lora=lora)
    given = ["--model", tmp_path / "model", "--dataset", tmp_path / "sites/a/dataset", "--settings", settings]
    ((_, code, said),) = run_rounds(0, 1, [("one", [*map(str, given), "--round", "0", "--out", str(tmp_path / "out")])])
    count = row.found.partition(" matches ")[2].partition(" tensor")[0]
    assert code == ExitCode.INPUT and f"matches {count} tensor" in said and "of the adapters, such as" in said
    base = {"freeze": ["*embed*", "*norm*"], "lora": lora}
    assert [one.verdict for one in rows_of(tmp_path / "base", training=base)] == ["ok"]


@pytest.mark.parametrize(
    ("training", "task", "told"),
    [
        ({"preference": {"beta": 0.2}}, "chat", True),
        ({"preference": {"beta": 0.2}}, "preference", False),
        ({"preference": {"beta": 0.2}}, None, True),  # of a facility that was not asked: its dataset is here
        ({}, "chat", False),
    ],
)
def test_preferences_that_the_dataset_does_not_hold_are_told(
    tmp_path: Path, training: dict[str, Any], task: str | None, told: bool
):
    """The data were trained on as what they are, and nobody said that the setting did nothing."""
    federation = read_federation(write_federation(tmp_path, ["a"], training=training))
    rows = [row for row in check_fitting(federation, {"a": task}) if row.check == "preference"]
    assert [row.verdict for row in rows] == (["warning"] if told else [])
