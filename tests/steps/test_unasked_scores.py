"""Scores on tasks are taken of those who were asked for them, in the rounds in which they were asked; of no others."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.archive.rounds import Archive
from coordinator.archive.table import note_of
from coordinator.comparison.account import read_account
from coordinator.config.evaluation import AskedTasks
from coordinator.config.federation import read_federation
from coordinator.config.settings import CoordinatorSettings, read_coordinator_settings
from coordinator.engine.render import coordinator_settings, render
from coordinator.report.data import gather
from coordinator.steps.aggregate import close_round, sort_out
from coordinator.steps.arrived import CollectedRound
from coordinator.steps.start import start
from facility.exchange.messages.comparison import with_tasks
from facility.exchange.messages.evaluation import Score, with_scores
from tests.aggregation.updates import write_update
from tests.comparison.test_phases import SETTINGS as COMPARED
from tests.comparison.test_phases import World
from tests.federations import write_federation
from tests.pico import save_pico

NAMES = ["a", "b"]
TOLD = [Score(task="mmlu_anatomy", metric="acc", value=0.99, stderr=0.01)]
RESULTS = {"results": [dataclasses.asdict(TOLD[0])]}


def settings_of(root: Path, **evaluation: Any) -> CoordinatorSettings:
    """As the steps read them of a federation that was rendered."""
    path = write_federation(root, NAMES, evaluation=evaluation)
    (root / "coordinator.json").write_text(render(read_federation(path))["workflow/coordinator.json"])
    return read_coordinator_settings(root / "coordinator.json")


def run(root: Path, settings: CoordinatorSettings) -> Archive:
    """All rounds and the final evaluation; in each, `a` tells scores of a part of the group that is asked for."""
    archive = Archive(root / "archive")
    model, number, proceed = start(archive, save_pico(root / "initial", dtype="bfloat16"), settings)
    for turn in range(9):
        if not proceed:
            break
        updates = [write_update(root / f"{name}{turn}", model, name, round=number) for name in NAMES]
        with_scores(updates[0], TOLD)
        arrived = sort_out(updates, NAMES, number)
        model, number, proceed = close_round(
            CollectedRound(archive=archive, settings=settings, model=model, number=number, arrived=arrived)
        )
    return archive


def rows_of_a(archive: Archive) -> list[dict[str, Any]]:
    """By round, the final evaluation last."""
    rows = [dataclasses.asdict(row) for entry in archive.history() for row in entry.facilities]
    return [row for row in [*rows, *archive.read_note("evaluation")["facilities"]] if row["facility"] == "a"]


@pytest.mark.parametrize(
    ("evaluation", "taken", "why"),
    [
        ({}, [False, False, False], "no task was asked of it"),
        ({"tasks": ["mmlu"], "facility": "b"}, [False, False, False], "no task was asked of it"),
        ({"tasks": ["mmlu"], "facility": "coordinator"}, [False, False, False], "no task was asked of it"),
        ({"tasks": ["mmlu"], "every": 5}, [True, False, True], "round 1 is not due for evaluation"),
        ({"tasks": ["mmlu"], "facility": "a"}, [True, True, True], ""),
    ],
)
def test_scores_that_nobody_asked_for_are_left_out_by_name(
    tmp_path: Path, evaluation: dict[str, Any], taken: list[bool], why: str
):
    archive = run(tmp_path, settings_of(tmp_path / "federation", **evaluation))
    rows = rows_of_a(archive)
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert [row["scores"] for row in rows] == [RESULTS if one else {} for one in taken]
    for row, one in zip(rows, taken, strict=True):
        said = note_of(row)
        assert not said if one else "mmlu_anatomy" in said and "that a reported are left out" in said and why in said
    data = gather(archive, federation="pico", settings={})
    assert [one["round"] for one in data["tasks"]] == [number for number, one in enumerate(taken) if one]
    listed = [(one["round"], one["facility"]) for one in data["failures"] if one["status"] == "not asked for"]
    assert listed == [(number, "a") for number, one in enumerate(taken) if not one]


def test_so_are_those_of_compared_models_but_for_accuracies_on_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answer = World.answer
    score = RESULTS["results"][0]
    of_data = [
        {"model": "global", "task": task, "metric": "accuracy", "value": 0.5, "stderr": 0.1}
        for task in ("validation", "held-out data")
    ]

    def telling(self: World, out: Path, name: str) -> Path:
        found = answer(self, out, name)
        if "comparison" in json.loads((found / "manifest.json").read_text())["extra"] and self.seen:
            with_tasks(found, [*of_data, {"model": "global"} | score])
        return found

    monkeypatch.setattr(World, "answer", telling)
    world = World(tmp_path, dataclasses.replace(COMPARED, asked_tasks=AskedTasks(facilities=["b"])))
    while world.proceed:
        world.go_on()
        assert world.passes < 9
    account = read_account(world.archive)
    assert account is not None and account.over
    assert account.tasks == {"a": of_data, "b": [*of_data, {"model": "global"} | score]}
    assert set(account.gaps) == {"a"} and "that a reported are left out: no task was asked of it" in account.gaps["a"]
    assert all(len(figures) == 6 for figures in account.figures.values())


def test_settings_of_an_earlier_version_that_do_not_say_whom_was_asked_are_read(tmp_path: Path):
    path = write_federation(tmp_path / "federation", NAMES)
    told = coordinator_settings(read_federation(path))
    del told["asked_tasks"]
    (tmp_path / "coordinator.json").write_text(json.dumps(told))
    settings = read_coordinator_settings(tmp_path / "coordinator.json")
    assert settings.asked_tasks is None
    assert [row["scores"] for row in rows_of_a(run(tmp_path, settings))] == [RESULTS] * 3
