"""`training.drift_correction` in federation.yml: what it cannot go with is refused at its line, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.config.federation import read_federation
from facility.exchange.errors import ConfigurationError

TWO = [{"name": name, "dataset": "/data"} for name in ("a", "b")]


def write(directory: Path, **changes: Any) -> Path:
    described = {
        "name": "f",
        "model": "model",
        "rounds": 3,
        "training": {"drift_correction": True},
        "facilities": TWO,
    }
    file = directory / "federation.yml"
    file.write_text(yaml.safe_dump(described | changes))
    return file


def test_it_is_one_setting_for_all_facilities(tmp_path: Path):
    federation = read_federation(write(tmp_path, aggregation={"rule": "nesterov"}))
    assert all(facility.training.drift_correction for facility in federation.facilities)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"facilities": TWO[:1]}, "single facility"),
        ({"facilities": [TWO[0], TWO[1] | {"training": {"drift_correction": False}}]}, "for all of them"),
        ({"aggregation": {"rule": "median"}}, "under median"),
        ({"aggregation": {"rule": "mean", "lora": "product"}}, "factors"),
        ({"facilities": [TWO[0], TWO[1] | {"training": {"freeze": ["*.embed*"]}}]}, "freeze the same"),
        ({"facilities": [TWO[0], TWO[1] | {"trainer": {"module": "own.train"}}]}, "trainer of its own"),
        ({"training": {"drift_correction": True, "keep_optimizer": False}}, "keep_optimizer"),
        ({"training": {"drift_correction": True, "sync": {"policy": "local"}}}, "sync.policy"),
    ],
)
def test_what_excludes_it_is_refused_with_the_reason(tmp_path: Path, changes: dict[str, Any], words: str):
    with pytest.raises(ConfigurationError, match=words):
        read_federation(write(tmp_path, **changes))
