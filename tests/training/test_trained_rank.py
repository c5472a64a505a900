"""Ranks that differ between facilities: what is beyond a facility's own stays as received, in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from facility.exchange.checkpoints.adapters import A, B
from facility.exchange.checkpoints.second_moments import has_factors
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.layout import LoraSettings
from facility.training.trained_rank import trained_whole
from tests.pico import save_pico
from tests.training.federation import largest_difference, write_dataset
from tests.training.layouts import TWO, arguments, rounds_in


@pytest.mark.slow
def test_components_beyond_the_rank_stay_as_received(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    rounds_in([("begun", arguments(tmp_path / "begun", model, dataset, lora={"rank": 4}))])
    weights, adapters = (
        load_file(model / "model.safetensors"),
        load_file(tmp_path / "begun/out/adapter_model.safetensors"),
    )
    save_file(weights | adapters, model / "model.safetensors", {"format": "pt"})

    own = {"lora": {"rank": 4, "trained_rank": 1}, "weight_decay": 0.1, "optimizer_state": "shared"}
    rounds_in([("one", arguments(tmp_path / "one", model, dataset, **own))])
    rounds_in([("fsdp", arguments(tmp_path / "fsdp", model, dataset, **(own | TWO["fsdp"])))], ranks=2)
    assert largest_difference(tmp_path / "one/out", tmp_path / "fsdp/out") < 1e-5

    assert not has_factors(tmp_path / "one/out"), "0 beyond the rank, they would lower the mean over all facilities"

    returned = load_file(tmp_path / "one/out/adapter_model.safetensors")
    assert returned.keys() == adapters.keys()
    for name, after in returned.items():
        before = adapters[name]
        trained = (slice(0, 1), slice(None)) if A in name else (slice(None), slice(0, 1))
        beyond = (slice(1, None), slice(None)) if A in name else (slice(None), slice(1, None))
        assert (A in name) != (B in name)
        assert torch.equal(after[beyond], before[beyond]), name
        assert not torch.equal(after[trained], before[trained]), name


def test_moments_leave_of_what_is_trained_whole():
    shapes = {"x.lora_A.weight": (4, 8), "x.lora_B.weight": (8, 4), "head.weight": (8, 8)}
    for rank, sent in ((0, {*shapes}), (4, {*shapes}), (1, {"head.weight"})):
        assert trained_whole(shapes, LoraSettings(rank=4, trained_rank=rank)).keys() == sent


def test_no_more_than_the_rank_can_be_trained():
    with pytest.raises(ConfigurationError, match="trained_rank is 8"):
        LoraSettings(rank=4, trained_rank=8)
