"""Laws of a base in half precision below adapters: nothing changes but the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.settings import TrainingSettings
from facility.training import lora
from facility.training.half_base import hold_in_half
from tests.pico import pico_config, save_pico
from tests.training.federation import largest_difference, weights, write_dataset
from tests.training.layouts import TWO, arguments, rounds_in

TRAINING: dict[str, Any] = {"compute_dtype": "bfloat16", "lora": {"rank": 4}, "learning_rate": 1e-2}
HELD = "frozen layers are held in bfloat16"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model of bfloat16 values, stored in bfloat16 and in float32."""
    place = tmp_path_factory.mktemp("bases")
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        directory = save_pico(place / str(dtype).removeprefix("torch."))
        file = directory / "model.safetensors"
        save_file({name: one.bfloat16().to(dtype) for name, one in load_file(file).items()}, file, {"format": "pt"})
        found[directory.name] = directory
    return found


def trained(place: Path, bases: dict[str, Path], layout: dict[str, Any], ranks: int) -> dict[str, Path]:
    """Updates of the same round from both; which of them was held in half precision was said."""
    dataset = write_dataset(place / "data")
    cases = [(name, arguments(place / name, base, dataset, **TRAINING | layout)) for name, base in bases.items()]
    said = rounds_in(cases, ranks=ranks)
    assert any(HELD in one for one in said["bfloat16"]) and not any(HELD in one for one in said["float32"])
    return {name: place / name / "out" for name in bases}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{}, {"lora": {"rank": 4, "modules_to_save": ["lm_head"]}}, {"layout": {"activation_checkpointing": "full"}}],
)
def test_the_update_is_bit_for_bit_that_of_a_base_in_float32(
    tmp_path: Path, bases: dict[str, Path], layout: dict[str, Any]
):
    updates = trained(tmp_path, bases, layout, ranks=1)
    assert largest_difference(updates["bfloat16"], updates["float32"]) == 0
    assert any(one.abs().max() > 0 for name, one in weights(updates["bfloat16"]).items() if "lora_B" in name)


@pytest.mark.parametrize("layout", [pytest.param(one, marks=pytest.mark.slow) for one in ("fsdp", "1f1b", "replicas")])
def test_in_layouts_too(tmp_path: Path, bases: dict[str, Path], layout: str):
    updates = trained(tmp_path, bases, TWO[layout], ranks=2)
    assert largest_difference(updates["bfloat16"], updates["float32"]) == 0


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 28),
        ({"lora": LoraSettings(rank=4, targets=["q_proj"], modules_to_save=["lm_head"])}, 28),
        ({"compute_dtype": "float16"}, 0),
        ({"compute_dtype": "float32"}, 0),
        ({"lora": LoraSettings(rank=4, dora=True)}, 0),
        ({"lora": LoraSettings(rank=4, quantize_base="nf4")}, 0),
        ({"lora": LoraSettings()}, 0),
    ],
)
def test_only_frozen_layers_of_the_blocks_that_are_stored_so(
    bases: dict[str, Path], settings: dict[str, Any], count: int
):
    """Four blocks of seven layers; embedding, norms and head stay in float32."""
    from transformers import AutoModelForCausalLM

    chosen: dict[str, Any] = {"compute_dtype": "bfloat16", "lora": LoraSettings(rank=4)} | settings
    training = TrainingSettings(**chosen)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(pico_config(), dtype=torch.float32)
    if training.lora.rank:
        lora.inject_adapters(model, training.lora, classifies=False)
    assert hold_in_half(model, open_checkpoint(bases["bfloat16"]), training) == count
    halved = [name for name, one in model.named_parameters() if one.dtype == torch.bfloat16]
    assert len(halved) == count and all("_proj" in name and "layers" in name for name in halved)
