"""Preferences above a base in 4 bits or in half precision: the reference is the base as it is held, adapters off."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from facility.exchange.messages.report import read_report
from tests.pico import save_pico
from tests.training.federation import largest_difference
from tests.training.layouts import TWO, arguments, rounds_in
from tests.training.test_documents import SIZE
from tests.training.test_preference import SETTINGS, answers, differences, pairs, prepare_pairs

WIDE = {"hidden_size": 64, "intermediate_size": 128}
BITS: dict[str, Any] = {"lora": {"rank": 4, "quantize_base": "nf4"}}
HALF: dict[str, Any] = {"lora": {"rank": 4}, "compute_dtype": "bfloat16"}
NOTHING = 1e-30
"""A learning rate under which adapters stay as they begin: they add nothing."""


def needs_bits() -> None:
    pytest.importorskip("bitsandbytes", reason="holds a base in 4 bits: pip install 'crossfed[quantized]'")


def reference(place: Path, split: str) -> numpy.ndarray:
    found: numpy.ndarray = numpy.load(place / "state/reference" / f"{split}.npy")
    return found


def with_adapters_off(model: Path, adapter: Path, training: dict[str, Any]) -> Any:
    """The base as peft's user holds it: bitsandbytes' layers, or all of it in half precision under autocast."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if training is BITS:
        from tests.training.test_quantized_base import pefts

        return pefts(model, adapter, training["lora"])
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), adapter)


@pytest.mark.parametrize(("training", "near"), [(BITS, 1e-5), (HALF, 0.2)], ids=["bits", "half"])
def test_the_reference_is_the_base_with_adapters_off(tmp_path: Path, training: dict[str, Any], near: float):
    """And the first loss is ln 2: the model begins as its own reference."""
    if training is BITS:
        needs_bits()
    model = save_pico(tmp_path / "model", "llama", dtype="bfloat16", **SIZE | WIDE)
    dataset = prepare_pairs(tmp_path / "data", pairs(6))
    settings = SETTINGS | {"batch_sequences": 6} | training
    still = settings | {"learning_rate": NOTHING}
    said = rounds_in([("r", arguments(tmp_path / "r", model, dataset.directory, **still))])["r"]
    assert any("10 pairs measured" in one for one in said)
    assert any("frozen layers are held in bfloat16" in one for one in said) == (training is HALF)
    report = read_report(tmp_path / "r/out")
    assert report.loss_received == report.loss_returned == pytest.approx(math.log(2), abs=1e-7)
    net = with_adapters_off(model, tmp_path / "r/out", training)
    with torch.no_grad(), net.disable_adapter():
        theirs = {split: differences(net, answers(dataset, split)).numpy() for split in ("train", "validation")}
    for split, found in theirs.items():
        assert numpy.abs(reference(tmp_path / "r", split) - found).max() < near, split
    rounds_in([("go", arguments(tmp_path / "go", model, dataset.directory, **settings | {"learning_rate": 1e-2}))])
    assert largest_difference(tmp_path / "r/out", tmp_path / "go/out") > 1e-4


def test_the_base_is_in_4_bits_in_the_reference_too(tmp_path: Path):
    """Its differences are not those of the base in float32."""
    needs_bits()
    model = save_pico(tmp_path / "model", "llama", **SIZE | WIDE)
    dataset = prepare_pairs(tmp_path / "data", pairs(6))
    for name, lora in (("bits", BITS), ("floats", {"lora": {"rank": 4}})):
        rounds_in([(name, arguments(tmp_path / name, model, dataset.directory, **SETTINGS | lora))])
    assert numpy.abs(reference(tmp_path / "bits", "train") - reference(tmp_path / "floats", "train")).max() > 1e-3


@pytest.mark.parametrize(
    ("training", "layout"),
    [(one, layout) for one in ("bits", "half") for layout in ("fsdp", "replicas", "1f1b")],
)
@pytest.mark.slow
def test_layouts_agree(tmp_path: Path, training: str, layout: str):
    if training == "bits":
        needs_bits()
    model = save_pico(tmp_path / "model", "llama", dtype="bfloat16", **SIZE | WIDE)
    dataset = prepare_pairs(tmp_path / "data", pairs(6))
    settings = SETTINGS | {"batch_sequences": 6} | {"bits": BITS, "half": HALF}[training]
    rounds_in([("one", arguments(tmp_path / "one", model, dataset.directory, **settings))])
    rounds_in([("two", arguments(tmp_path / "two", model, dataset.directory, **settings, **TWO[layout]))], ranks=2)
    near = 1e-5 if training == "bits" else 3e-3
    assert largest_difference(tmp_path / "one/out", tmp_path / "two/out") < near
    assert read_report(tmp_path / "two/out").loss_received == pytest.approx(math.log(2), abs=1e-6)
    apart = numpy.abs(reference(tmp_path / "one", "train") - reference(tmp_path / "two", "train")).max()
    assert apart < (1e-4 if training == "bits" else 0.1)
