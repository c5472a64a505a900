"""Which moments facilities average: settings that do not go together are refused at their line, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.config.federation import read_federation
from facility.exchange.errors import ConfigurationError

SHARED = {"optimizer_state": "shared"}


def write(directory: Path, *training: dict[str, Any], **changes: Any) -> Path:
    """A federation with a facility for each of the settings."""
    facilities = [{"name": "abc"[n], "dataset": "/data", "training": one} for n, one in enumerate(training)]
    described = {"name": "f", "model": "model", "rounds": 3, "facilities": facilities}
    file = directory / "federation.yml"
    file.write_text(yaml.safe_dump(described | changes))
    return file


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (SHARED | {"optimizer_state_form": "int8"}, "optimizer_state_form is 'factors' for 'a' and 'int8' for 'b'"),
        (SHARED | {"optimizer_state_every": 2}, "optimizer_state_every is 1 for 'a' and 2 for 'b'"),
        ({"optimizer": "adafactor", "first_moments": "mean"}, "adafactor"),
        ({"first_moments": "mean", "keep_optimizer": False}, "keep_optimizer"),
        ({"first_moments": "max"}, "first_moments"),
        ({"optimizer_state_every": 0}, "optimizer_state_every"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(tmp_path: Path, second: dict[str, Any], words: str):
    with pytest.raises(ConfigurationError, match=words):
        read_federation(write(tmp_path, SHARED, second))


def test_a_facility_whose_optimizer_has_none_takes_no_part(tmp_path: Path):
    federation = read_federation(write(tmp_path, {"first_moments": "mean"}, {"optimizer": "adafactor"}))
    assert [one.training.first_moments for one in federation.facilities] == ["mean", "off"]


def test_beside_a_trainer_of_its_own_nobody_averages_any(tmp_path: Path):
    file = write(tmp_path, {"first_moments": "mean"}, {})
    described = yaml.safe_load(file.read_text())
    described["facilities"][1]["trainer"] = {"module": "own.train"}
    file.write_text(yaml.safe_dump(described))
    with pytest.raises(ConfigurationError, match="first_moments.*trainer of its own"):
        read_federation(file)
