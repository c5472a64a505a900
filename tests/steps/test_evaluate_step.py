"""The coordinator's own evaluation on tasks: when it is due, what it leaves, and where its scores are shown."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from coordinator.config.settings import CoordinatorSettings
from coordinator.engine.render import render
from coordinator.report.data import gather
from coordinator.steps import evaluate
from coordinator.steps.aggregate import close_round, sort_out
from coordinator.steps.arrived import CollectedRound
from coordinator.steps.start import start
from facility.exchange.messages.evaluation import EvaluationSettings
from tests.aggregation.updates import write_update
from tests.federations import write_federation
from tests.pico import save_pico

SETTINGS = CoordinatorSettings(
    federation="f", rounds=2, facilities=["a"], evaluation=EvaluationSettings(tasks=["count_up"], every=2)
)
FOUND = {"results": [{"task": "count_up", "metric": "acc", "value": 0.5, "stderr": 0.1}]}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that were started in place of lm-eval's, which leave `FOUND`."""
    commands: list[list[str]] = []

    def run(command: list[str]) -> int:
        commands.append(command)
        Path(command[command.index("--out") + 1]).write_text(json.dumps(FOUND))
        return 0

    monkeypatch.setattr(evaluate, "start", run)
    return commands


def test_models_are_evaluated_when_due_and_the_scores_are_of_the_model_received(tmp_path: Path, asked: list[list[str]]):
    archive = Archive(tmp_path / "archive")
    model, number, proceed = start(archive, save_pico(tmp_path / "model", dtype="bfloat16"), SETTINGS)
    while proceed:
        scores = evaluate.scores(model, number, SETTINGS)
        arrived = sort_out([write_update(tmp_path / f"a{number}", model, "a", round=number)], ["a"], number)
        arrived = dataclasses.replace(arrived, scores=scores)
        model, number, proceed = close_round(
            CollectedRound(archive=archive, settings=SETTINGS, model=model, number=number, arrived=arrived)
        )
    assert len(asked) == 2  # rounds 0 and the final model, not round 1
    assert archive.read_round(0).scores == FOUND and archive.read_round(1).scores == {}
    data = gather(archive, federation="f", settings={})
    assert [(one["round"], one["facility"], one["value"]) for one in data["tasks"]] == [
        (0, "coordinator", 0.5),
        (2, "coordinator", 0.5),
    ]


def test_an_evaluation_that_leaves_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, _, _ = start(Archive(tmp_path / "archive"), save_pico(tmp_path / "model", dtype="bfloat16"), SETTINGS)
    monkeypatch.setattr(evaluate, "start", lambda command: -9)
    assert evaluate.scores(model, 0, SETTINGS) == {
        "results": [],
        "problem": "the evaluation on tasks ended with code -9",
    }
    assert evaluate.scores(model, 0, dataclasses.replace(SETTINGS, evaluation=None)) == {}


def test_the_step_is_rendered_where_the_coordinator_evaluates_and_nowhere_else(tmp_path: Path):
    tasks = {"tasks": ["arc_easy"], "facility": "coordinator"}
    path = write_federation(tmp_path / "one", ["a", "b"], evaluation=tasks)
    files = render(read_federation(path))
    steps = yaml.safe_load(files["cwl/round.cwl"])["steps"]
    assert steps["evaluate"]["run"] == "tools/evaluate.cwl" and steps["aggregate"]["in"]["scores"] == "evaluate/scores"
    assert json.loads(files["workflow/facilities/a.json"])["evaluation"]["tasks"] == []
    assert json.loads(files["workflow/coordinator.json"])["evaluation"]["tasks"] == ["arc_easy"]
    other = render(read_federation(write_federation(tmp_path / "two", ["a"], evaluation=tasks | {"facility": "all"})))
    assert "evaluate" not in yaml.safe_load(other["cwl/round.cwl"])["steps"]
    named = write_federation(tmp_path / "three", ["a", "coordinator"], evaluation=tasks)
    assert "evaluate" not in yaml.safe_load(render(read_federation(named))["cwl/round.cwl"])["steps"]
