"""A pipeline schedule from outside the package: settings, simulator and trainer take it by its dotted path."""

from __future__ import annotations

from pathlib import Path

import pytest

from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.layout import LayoutSettings
from facility.exchange.schedules.registry import SCHEDULES, PipelineSchedule
from facility.training.parallel.pipeline import torch_class
from tests.pico import save_pico
from tests.training.federation import largest_difference, write_dataset
from tests.training.layouts import arguments, rounds_in

OWN = "tests.training.outside_schedule:forwards_first"
STAGES = {"stages": 2, "units": [[0, 2], [2, 6]]}


@pytest.mark.slow
def test_two_stages_train_under_it_as_under_the_one_that_it_is_made_of(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    cases = [
        (name, arguments(tmp_path / name, model, dataset, layout=STAGES | {"schedule": schedule}))
        for name, schedule in (("own", OWN), ("gpipe", "gpipe"))
    ]
    said = rounds_in(cases, ranks=2)
    assert largest_difference(tmp_path / "own/out", tmp_path / "gpipe/out") == 0.0
    assert all("forwards first" in one for one in said["own"])
    assert not any("forwards first" in one for one in said["gpipe"])


def test_its_order_is_what_planner_and_simulator_load():
    assert LayoutSettings(schedule=OWN, stages=2).schedule == OWN
    order = SCHEDULES.load(OWN)
    assert order(2, 1, 4) == SCHEDULES.load("gpipe")(2, 1, 4) and SCHEDULES.get(OWN).holds_all


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ScheduleNowhere", "expected a class of torch"),
        ("nowhere.at_all:Schedule", "No module named 'nowhere'"),
        ("pathlib:Path", "expected a class that extends"),
    ],
)
def test_a_class_that_is_none_is_refused(name: str, words: str):
    with pytest.raises(ConfigurationError, match=words):
        torch_class(PipelineSchedule(name="mine", torch_class=name))
