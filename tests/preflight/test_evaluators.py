"""lm-eval and experiment trackers that are missing where they are asked for are said before the run, as warnings."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from coordinator.config.federation import Federation, read_federation
from coordinator.preflight.check import check
from coordinator.preflight.evaluators import check_own_evaluators, check_tasks
from facility.probe import OPTIONAL, packages
from tests.federations import write_federation


def federation(folder: Path, more: str) -> Federation:
    file = write_federation(folder, ["a", "b"])
    file.write_text(file.read_text() + more)
    return read_federation(file)


def test_a_facility_without_lm_eval_is_named_where_it_is_to_evaluate(tmp_path: Path):
    asked = federation(tmp_path, "evaluation: {tasks: [arc_easy], facility: a}\n")
    (row,) = check_tasks(asked, "a", {"lm_eval": None})
    assert row.verdict == "warning" and "a, which has no lm-eval" in row.found and "pip install" in row.fix
    (row,) = check_tasks(asked, "a", {"lm_eval": "0.4.9"})
    assert row.verdict == "ok" and "0.4.9" in row.found
    assert not check_tasks(asked, "b", {"lm_eval": None}), "asked for nothing"
    assert not check_tasks(asked, "a", {}) and not check_tasks(asked, "a", None), "an older version there"
    assert "lm_eval" in packages(OPTIONAL)


def test_the_coordinator_without_lm_eval_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = federation(tmp_path, "evaluation: {tasks: [arc_easy], facility: coordinator}\n")
    assert not check_own_evaluators(asked)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "lm_eval" else found(name))
    (row,) = check_own_evaluators(asked)
    assert row.verdict == "warning" and "no lm-eval here" in row.found


@pytest.mark.parametrize(
    ("names", "verdict", "found"),
    [
        ("tensorboard", "ok", "can be fed"),
        ("tensorbord", "warning", "knows no tracker tensorbord"),
        ("aim", "warning", "not installed here: aim"),
    ],
)
def test_a_tracker_that_would_not_be_fed_is_named(tmp_path: Path, names: str, verdict: str, found: str):
    asked = federation(tmp_path, f"trackers: [{names}]\n")
    (row,) = check_own_evaluators(asked)
    assert row.verdict == verdict and found in row.found


def test_the_whole_check_has_the_rows(tmp_path: Path):
    asked = federation(tmp_path, "trackers: [tensorbord]\nevaluation: {tasks: [arc_easy]}\n")
    said = [(row.subject, row.check, row.verdict) for row in check(asked.file, link=False)]
    assert ("coordinator", "trackers", "warning") in said
    assert {("a", "tasks", "ok"), ("b", "tasks", "ok")} <= set(said)
