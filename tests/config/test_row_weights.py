"""A rule that weighs facilities by their second moments: where it can, and what becomes of it where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.aggregation.settings import AggregationSettings
from coordinator.config.federation import read_federation
from coordinator.config.row_weights import with_row_weights
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.settings import LoraSettings, TrainingSettings

FILE = """
name: x
model: m
rounds: 30
{more}
training: {{steps: 10{training}}}
facilities:
  - {{name: a, dataset: d}}
  - {{name: b, dataset: d}}
  - {{name: c, dataset: d}}
"""
GIVEN = "aggregation: {rule: fisher+nesterov}"
SHARED = TrainingSettings(optimizer_state="shared")
OBSTACLES = {
    "personal": (", optimizer_state: personal", "optimizer_state of 'a' is 'personal'"),
    "adapters": (", lora: {rank: 4}", "optimizer_state of 'a' is 'personal'"),
    "another form": (", optimizer_state_form: int8", "'int8', which has no row means"),
    "rarely": (", optimizer_state_every: 3", "optimizer_state_every of 'a' is 3, so that they travel in one"),
    "drift": (", drift_correction: true", "drift_correction of 'a' is true"),
}


def read(place: Path, training: str = "", more: str = GIVEN):
    file = place / "federation.yml"
    file.write_text(FILE.format(training=training, more=more))
    return read_federation(file)


def test_asked_for_it_makes_second_moments_travel(tmp_path: Path):
    federation = read(tmp_path)
    assert federation.aggregation.rule == "fisher+nesterov"
    assert {one.training.optimizer_state for one in federation.facilities} == {"shared"}


@pytest.mark.parametrize("name", OBSTACLES)
def test_asked_for_where_there_are_none_to_see_it_is_refused_with_the_reason(tmp_path: Path, name: str):
    training, reason = OBSTACLES[name]
    with pytest.raises(ConfigurationError, match=reason) as refused:
        read(tmp_path, training)
    assert refused.value.line is not None and "expected" in str(refused.value)


def test_chosen_by_auto_it_gives_way_to_the_weighted_mean_which_is_told():
    chosen = AggregationSettings(rule="fisher+nesterov", server_learning_rate=1.2, momentum=0.7)
    same, nothing = with_row_weights(chosen, {"a": SHARED}, masked=False, chosen=True)
    assert same is chosen and nothing == ""
    for training, masked in (
        (TrainingSettings(optimizer_state="personal", lora=LoraSettings(rank=4)), False),
        (TrainingSettings(optimizer_state="shared", drift_correction=True), False),
        (SHARED, True),
    ):
        found, told = with_row_weights(chosen, {"a": SHARED, "b": training}, masked=masked, chosen=True)
        assert (found.rule, found.server_learning_rate) == ("nesterov", 1.2)  # type: ignore[attr-defined]
        assert "by the weighted mean, as" in told and ("'b'" in told or masked)


def test_other_rules_are_left_alone():
    personal = {"a": TrainingSettings(optimizer_state="personal")}
    for rule in ("mean", "nesterov", "median"):
        settings = AggregationSettings(rule=rule)
        assert with_row_weights(settings, personal, masked=True, chosen=False) == (settings, "")
