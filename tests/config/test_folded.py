"""A folded description says the same, and grows by what is a facility's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.config.described import describe_federation
from coordinator.config.federation import read_federation
from coordinator.config.folded import fold_description, unfold_description
from coordinator.config.settings import CoordinatorSettings, read_coordinator_settings
from coordinator.engine.render import coordinator_settings, write_rendered
from tests.federations import write_federation


def facility(number: int, **more: Any) -> dict[str, Any]:
    return {"name": f"site{number:04}", "dataset": "../sites/site0/dataset", **more}


def federation_of(tmp_path: Path, facilities: list[dict[str, Any]]) -> Path:
    path = tmp_path / "workflow" / "federation.yml"
    if not path.exists():
        write_federation(tmp_path, ["site0"])
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"facilities": facilities}))
    return path


@pytest.mark.parametrize(
    "facilities",
    [
        [facility(0)],
        [facility(0), facility(1)],
        [facility(0), facility(1, training={"steps": 9}), facility(2, training={"learning_rate": 0.5})],
    ],
)
def test_unfolded_it_is_the_description_itself(facilities: list[dict[str, Any]], tmp_path: Path):
    whole = describe_federation(read_federation(federation_of(tmp_path, facilities)))
    told = json.loads(json.dumps(fold_description(whole)))
    assert unfold_description(told) == whole
    assert json.dumps(unfold_description(told)) == json.dumps(whole), "in the same order"
    assert unfold_description(whole) == whole, "as earlier versions wrote it"


@pytest.mark.parametrize("value", [{}, {"federation": {"a": 1}}, None, "text"])
def test_what_is_not_folded_stays_as_it_is(value: object):
    assert unfold_description(value) == value


def test_true_and_one_are_not_alike():
    whole = {"federation": {}, "facilities": {"a": {"x": True, "y": 0}, "b": {"x": 1, "y": 0}}}
    assert fold_description(whole)["common"] == {"y": 0}
    assert json.dumps(unfold_description(fold_description(whole))) == json.dumps(whole)


def test_the_file_grows_by_what_each_facility_has_of_its_own(tmp_path: Path):
    sizes = {}
    for count in (2, 4, 8):
        federation = read_federation(federation_of(tmp_path, [facility(number) for number in range(count)]))
        sizes[count] = len(json.dumps(coordinator_settings(federation)))
    assert sizes[8] - sizes[4] == 2 * (sizes[4] - sizes[2]), "the same for each"
    assert sizes[4] - sizes[2] < 2 * 100


def test_the_steps_read_what_was_described(tmp_path: Path):
    path = federation_of(tmp_path, [facility(0), facility(1, training={"steps": 9})])
    federation = read_federation(path)
    write_rendered(federation)
    settings: CoordinatorSettings = read_coordinator_settings(path.parent / "coordinator.json")
    assert settings.described == describe_federation(federation)
