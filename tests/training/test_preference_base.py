"""Preferences above a base in 4 bits: the reference is the base as it is held, adapters off."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from facility.exchange.messages.report import read_report
from tests.pico import save_pico
from tests.training.layouts import arguments, rounds_in
from tests.training.test_documents import SIZE
from tests.training.test_preference import SETTINGS, answers, differences, pairs, prepare_pairs

pytest.importorskip("bitsandbytes", reason="holds a base in 4 bits: pip install 'crossfed[quantized]'")

WIDE = {"hidden_size": 64, "intermediate_size": 128}
LORA: dict[str, Any] = {"rank": 4, "quantize_base": "nf4"}
NOTHING = 1e-30
"""A learning rate under which adapters stay as they begin: they add nothing."""
NEAR = 2e-2
"""Of sums over the tokens of two answers, up to 60 nats; measured: 5e-3, of kernels that peft's layers take without
gradients."""


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
    with torch.no_grad(), net.disable_adapter():
        theirs = {split: differences(net, answers(dataset, split)).numpy() for split in ("train", "validation")}
    for split, found in theirs.items():
        held = numpy.load(tmp_path / "r/state/reference" / f"{split}.npy")
        assert numpy.abs(held - found).max() < NEAR, split
