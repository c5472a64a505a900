"""What `evaluation:` asks for at the end: where it cannot be, it is refused at its line; elsewhere it is rendered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.config.federation import read_federation
from coordinator.config.settings import read_coordinator_settings
from coordinator.engine.render import render, write_rendered
from coordinator.memory.figures import model_figures
from coordinator.preflight.comparison import check_comparison
from facility.exchange.errors import ConfigurationError
from tests.federations import write_federation

MATRIX = {"matrix": True, "alone": True}
MASKS: dict[str, Any] = {
    "privacy": {"secure_aggregation": True, "peer_signers": "/k"},
    "aggregation": {"rule": "mean", "allowed_signers": "/k"},
    "training": {"export_dtype": "float32", "signing_key": "/k"},
}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"evaluation": {"alone": True}}, "matrix"),
        ({"evaluation": {"held_out": {"facility": "a", "dataset": "d"}}}, "matrix"),
        ({"evaluation": {"matrix": True, "held_out": {"facility": "c", "dataset": "d"}}}, "expected one of a, b"),
        ({"evaluation": {"matrix": True, "held_out": {"facility": "a", "dataset": "d", "name": "b"}}}, "own data"),
        ({"evaluation": MATRIX, "aggregation": {"exclude": ["lm_head*"]}}, "aggregation.exclude"),
        ({"evaluation": {"matrix": True, "models_per_job": 0}}, "models_per_job"),
    ],
)
def test_what_cannot_be_compared_is_refused_at_its_line(changes: dict[str, Any], what: str, tmp_path: Path):
    path = write_federation(tmp_path, ["a", "b"], **changes)
    with pytest.raises(ConfigurationError, match=what) as found:
        read_federation(path)
    assert f"{path}:" in str(found.value)


def test_the_steps_and_the_one_facility_are_told(tmp_path: Path):
    held_out = {"facility": "b", "dataset": "../held", "name": "wikitext"}
    path = write_federation(tmp_path, ["a", "b"], evaluation=MATRIX | {"held_out": held_out})
    federation = read_federation(path)
    write_rendered(federation)
    told = read_coordinator_settings(path.with_name("coordinator.json")).comparison
    assert told is not None and (told.alone, told.held_out, told.held_out_name) == (True, "b", "wikitext")
    files = render(federation)
    evaluations = {name: json.loads(files[f"workflow/facilities/{name}.json"])["evaluation"] for name in "ab"}
    assert "held_out" not in evaluations["a"] and evaluations["b"]["held_out"] == str((tmp_path / "held").resolve())
    steps = yaml.safe_load(files["cwl/round.cwl"])["steps"]
    assert steps["receive_a"]["in"]["archive"] == "archive"


def test_with_masks_each_facility_is_told_to_keep_its_own_update(tmp_path: Path):
    federation = read_federation(write_federation(tmp_path, ["a", "b", "c"], evaluation=MATRIX, **MASKS))
    files = render(federation)
    assert json.loads(files["workflow/coordinator.json"])["comparison"]["updates"] is False
    told = [json.loads(files[f"workflow/facilities/{name}.json"])["evaluation"]["own_models"] for name in "abc"]
    assert told == [True] * 3
    plain = render(read_federation(write_federation(tmp_path / "plain", ["a", "b"], evaluation=MATRIX)))
    assert "own_models" not in json.loads(plain["workflow/facilities/a.json"])["evaluation"]


def test_without_a_matrix_nothing_is_rendered_of_it(tmp_path: Path):
    files = render(read_federation(write_federation(tmp_path, ["a"])))
    assert "comparison" not in json.loads(files["workflow/coordinator.json"])
    assert "held_out" not in json.loads(files["workflow/facilities/a.json"])["evaluation"]
    assert "archive" not in yaml.safe_load(files["cwl/round.cwl"])["steps"]["receive_a"]["in"]


def test_its_price_is_told_before_anything_runs(tmp_path: Path):
    federation = read_federation(write_federation(tmp_path, ["a", "b"], evaluation=MATRIX | {"models_per_job": 4}))
    facility, model = federation.facilities[0], model_figures(tmp_path / "model")
    template = "#SBATCH --nodes=2\n#SBATCH --time=03:00:00\n"
    row = check_comparison(federation, facility, facility.deployment, model, template)
    # 6 models: the global one with 3 others, then with 2; 2 rounds alone. 4 jobs of 2 nodes and 3 hours.
    assert row is not None and "4 more jobs" in row.found and "at most 24 node-hours" in row.found, row
    masked = read_federation(write_federation(tmp_path / "masked", ["a", "b", "c"], evaluation=MATRIX, **MASKS))
    row = check_comparison(masked, masked.facilities[0], facility.deployment, model, template)
    # The initial and the global model in one job, two rounds alone.
    assert row is not None and "3 more jobs" in row.found and "2 of its own as well" in row.found, row
    assert (
        check_comparison(
            read_federation(write_federation(tmp_path / "plain", ["a"])), facility, facility.deployment, model, template
        )
        is None
    )
