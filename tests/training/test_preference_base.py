"""Preferences above a base in 4 bits or half precision: the reference is the base as it is held, adapters off."""

from __future__ import annotations

import importlib.util
import math
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from facility.exchange.messages.report import read_report
from tests.pico import save_pico
from tests.training.federation import largest_difference, weights
from tests.training.layouts import TWO, arguments, rounds_in
from tests.training.test_documents import SIZE
from tests.training.test_half_base import HELD
from tests.training.test_preference import SETTINGS, answers, differences, pairs, prepare_pairs

in_bits = pytest.mark.skipif(
    not importlib.util.find_spec("bitsandbytes"), reason="holds a base in 4 bits: pip install 'crossfed[quantized]'"
)
WIDE = {"hidden_size": 64, "intermediate_size": 128}
LORA: dict[str, Any] = {"rank": 4, "quantize_base": "nf4"}
NOTHING = 1e-30
"""A learning rate under which adapters stay as they begin: they add nothing."""
NEAR = 1e-4
"""Of sums over the tokens of two answers, up to 60 nats; measured: 1.1e-5."""


@pytest.mark.slow
def test_above_a_base_in_half_precision_they_are_bit_for_bit_those_above_the_same_values_in_float32(tmp_path: Path):
    dataset, base = prepare_pairs(tmp_path / "data", pairs(6)), save_pico(tmp_path / "bf16", "llama", **SIZE)
    values = {name: one.bfloat16() for name, one in load_file(base / "model.safetensors").items()}
    whole = Path(shutil.copytree(base, tmp_path / "f32"))
    for place, dtype in ((base, torch.bfloat16), (whole, torch.float32)):
        save_file({name: one.to(dtype) for name, one in values.items()}, place / "model.safetensors", {"format": "pt"})
    settings = SETTINGS | {
        "batch_sequences": 6,
        "lora": {"rank": 4},
        "compute_dtype": "bfloat16",
        "learning_rate": 1e-2,
    }
    places = {name: tmp_path / name for name in ("half", "full")}
    cases = [
        (name, arguments(place, model, dataset.directory, **settings))
        for (name, place), model in zip(places.items(), (base, whole), strict=True)
    ]
    said = rounds_in(cases)
    assert HELD in said["half"][0] and HELD not in said["full"][0]
    for split in ("train", "validation"):
        held = [numpy.load(place / "state/reference" / f"{split}.npy") for place in places.values()]
        assert numpy.array_equal(*held) and len(held[0])
    assert largest_difference(places["half"] / "out", places["full"] / "out") == 0
    assert any(one.abs().max() > 0 for name, one in weights(places["half"] / "out").items() if "lora_B" in name)


@in_bits
@pytest.mark.slow
def test_above_a_base_in_4_bits_every_layout_trains_alike(tmp_path: Path):
    dataset, model = prepare_pairs(tmp_path / "data", pairs(6)), save_pico(tmp_path / "model", "llama", **SIZE | WIDE)
    settings = SETTINGS | {"batch_sequences": 6, "lora": LORA}
    rounds_in([("one", arguments(tmp_path / "one", model, dataset.directory, **settings))])
    layouts = {name: TWO[name] for name in ("fsdp", "replicas", "1f1b")}
    cases = [(n, arguments(tmp_path / n, model, dataset.directory, **settings, **more)) for n, more in layouts.items()]
    rounds_in(cases, ranks=2)
    moved = weights(tmp_path / "one/out")
    assert any(one.abs().max() > 1e-4 for name, one in moved.items() if "lora_B" in name)
    for name in layouts:
        assert largest_difference(tmp_path / "one/out", tmp_path / name / "out") < 1e-5, name


@pytest.mark.slow
@in_bits
def test_the_first_loss_is_that_of_a_model_that_is_its_own_reference(tmp_path: Path):
    """ln 2; and the reference is what peft's user has with adapters off over bitsandbytes' layers."""
    from tests.training.test_quantized_base import pefts

    model = save_pico(tmp_path / "model", "llama", dtype="bfloat16", **SIZE | WIDE)
    dataset = prepare_pairs(tmp_path / "data", pairs(6))
    still = SETTINGS | {"batch_sequences": 6, "lora": LORA, "learning_rate": NOTHING}
    said = rounds_in([("r", arguments(tmp_path / "r", model, dataset.directory, **still))])["r"]
    assert any("10 pairs measured" in one for one in said)
    report = read_report(tmp_path / "r/out")
    assert report.loss_received == report.loss_returned == pytest.approx(math.log(2), abs=1e-7)
    net = pefts(model, tmp_path / "r/out", LORA)
    net.train()  # where CPUs have bfloat16 of their own, `eval` takes kernels that round to it: 5e-3 nats here
    with torch.no_grad(), net.disable_adapter():
        theirs = {split: differences(net, answers(dataset, split)).numpy() for split in ("train", "validation")}
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        unlike = {split: differences(whole, answers(dataset, split)).numpy() for split in theirs}
    for split, found in theirs.items():
        held = numpy.load(tmp_path / "r/state/reference" / f"{split}.npy")
        assert numpy.abs(held - found).max() < NEAR, split
        assert numpy.abs(held - unlike[split]).max() > 0.1, f"{split}: the base in 4 bits, not the received one"
