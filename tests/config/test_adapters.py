"""`training.lora` in federation.yml: what facilities' adapters have in common is refused where it differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.config.federation import read_federation
from facility.exchange.errors import ConfigurationError

ALL = {"rank": 4, "targets": ["q_proj", "v_proj"]}


def write(directory: Path, lora: dict[str, Any], own: dict[str, Any]) -> Path:
    described = {
        "name": "f",
        "model": "model",
        "rounds": 3,
        "training": {"lora": lora},
        "facilities": [{"name": "a", "dataset": "/data"}, {"name": "b", "dataset": "/data", "training": {"lora": own}}],
    }
    file = directory / "federation.yml"
    file.write_text(yaml.safe_dump(described))
    return file


@pytest.mark.parametrize(
    ("lora", "own", "key"),
    [
        ({}, ALL, "rank"),
        (ALL, {"base": "/models/b"}, "rank"),  # meant to add to the federation's, and takes its place
        (ALL, ALL | {"rank": 8}, "rank"),
        (ALL | {"alpha": 32}, ALL, "alpha"),
        (ALL, ALL | {"rslora": True}, "rslora"),
        (ALL, ALL | {"dora": True}, "dora"),
        (ALL | {"freeze_a": True}, ALL, "freeze_a"),
        (ALL, {"rank": 4}, "targets"),
        (ALL | {"parameters": ["experts.down_proj"]}, ALL, "parameters"),
        (ALL | {"modules_to_save": ["lm_head"]}, ALL, "modules_to_save"),
    ],
)
def test_what_an_adapter_is_must_be_the_same_everywhere(
    lora: dict[str, Any], own: dict[str, Any], key: str, tmp_path: Path
):
    """Other ranks and targets trained for nothing in every round; another alpha was averaged as if it were the same."""
    with pytest.raises(ConfigurationError, match=rf"^\S+: lora\.{key} is .* for 'a' and .* for 'b'; expected the same"):
        read_federation(write(tmp_path, lora, own))


@pytest.mark.parametrize(
    "own",
    [
        ALL | {"trained_rank": 2},
        ALL | {"dropout": 0.5},
        ALL | {"base": "/models/b"},
        ALL | {"quantize_base": "nf4"},
        ALL | {"targets": ["v_proj", "q_proj"]},
    ],
)
def test_what_is_a_facilitys_own_may_differ(own: dict[str, Any], tmp_path: Path):
    assert read_federation(write(tmp_path, ALL, own)).facilities[1].training.lora.rank == 4


def test_keys_that_no_adapter_comes_of_may_differ(tmp_path: Path):
    read_federation(write(tmp_path, {}, {"alpha": 32}))
