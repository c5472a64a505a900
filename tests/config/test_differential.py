"""`privacy.differential`: it reaches each facility's settings, beside masks too, and what it excludes has a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.engine.render import render
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.privacy import DifferentialSettings
from facility.exchange.messages.settings import read_facility_settings
from tests.config.test_privacy import described, read

BUDGET = {"epsilon": 4.0, "delta": 1e-6}


def private(training: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    content = {
        "name": "f",
        "model": "model",
        "rounds": 2,
        "training": training or {},
        "privacy": {"differential": BUDGET},
        "facilities": [{"name": name, "dataset": "d"} for name in ("a", "b")],
    }
    return content | changes


@pytest.mark.parametrize("masked", [False, True], ids=["alone", "masked"])
def test_the_budget_reaches_every_facility(tmp_path: Path, masked: bool):
    content = private()
    if masked:
        content = described()
        content["privacy"] |= {"differential": BUDGET}
    files = render(read(tmp_path, content))
    for name in ("a", "b"):
        path = tmp_path / f"{name}.json"
        path.write_text(next(text for file, text in files.items() if str(file).endswith(f"facilities/{name}.json")))
        found = read_facility_settings(path)
        assert found.differential == DifferentialSettings(epsilon=4.0, delta=1e-6, unit="document", clip=1.0)
        assert (found.masking is not None) == masked


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training": {"sync": {"policy": "diloco"}}}, "one sum over all replicas"),
        ({"training": {"layout": {"stages": 2}}}, "adds the gradients of a micro-batch up stage by stage"),
        ({"training": {"ranks": 2}}, "expected NO_SHARD"),
        ({"training": {"layout": {"offload": True}}}, "belongs to FSDP"),
        ({"training": {"layout": {"plan": "plan.json"}}}, "may cut the model into stages"),
        ({"training": {"layout": {"activation_checkpointing": "full"}}}, "bounded by training.micro_batch_sequences"),
        ({"training": {"layout": {"compile": True}}}, "the gradient of each unit"),
        ({"training": {"compute_dtype": "float16"}}, "known from single records"),
        ({"facilities": [{"name": "a", "dataset": "d", "public": {"dataset_card": True}}]}, "counts and digests"),
        ({"evaluation": {"matrix": True}}, "losses block by block"),
        ({"privacy": {"differential": {"epsilon": 0.0, "delta": 1e-6}}}, "epsilon"),
        ({"privacy": {"differential": {"epsilon": 1.0, "delta": 1.0}}}, "delta"),
        ({"privacy": {"differential": {"epsilon": 1.0}}}, "delta"),
        ({"privacy": {"differential": BUDGET | {"unit": "person"}}}, "unit"),
    ],
)
def test_what_cannot_be_private_is_refused_with_the_reason(tmp_path: Path, changes: dict[str, Any], words: str):
    with pytest.raises(ConfigurationError, match=words) as caught:
        read(tmp_path, private(**changes))
    assert caught.value.line is not None


def test_replicas_of_whole_models_may_be_private(tmp_path: Path):
    assert read(tmp_path, private({"ranks": 2, "layout": {"sharding": "NO_SHARD"}, "lora": {"rank": 4}})).privacy
