"""Law: one step of the trainer is a plain step of transformers' own model (with adapters: of peft's)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.training.family_table import material
from tests.training.family_trial import families, verdict

FEW = {
    "causal": ["gemma2", "qwen3_moe", "mamba", "bloom", "phimoe", "bart"],
    "masked": ["bert", "deberta-v2", "mobilebert", "mpnet"],
    "classes": ["qwen3", "bart", "distilbert", "deepseek_v3"],
}
"""Unlike ones: of experts, without attention, encoder-decoders, and those that were once trained wrongly."""


@pytest.mark.parametrize("task", list(FEW))
def test_unlike_families_train_as_transformers_and_peft_do(tmp_path: Path, task: str):
    datasets = material(tmp_path)
    for family in FEW[task]:
        assert family in families(task)
        for lora in (False, True):
            found = verdict(tmp_path / "trial", task, family, datasets, lora=lora)
            assert found.word == "works", (family, lora, found)


@pytest.mark.parametrize(
    ("task", "family", "lora", "why"),
    [
        ("masked", "ibert", False, "moves the ranges of its activations"),
        ("masked", "squeezebert", True, "no layer in transformer.encoder.layers .* is a plain linear layer"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_its_reason(
    tmp_path: Path, task: str, family: str, lora: bool, why: str
):
    found = verdict(tmp_path / "trial", task, family, material(tmp_path), lora=lora)
    assert found.word == "refused" and re.search(why, found.reason), found


def test_rows_without_an_end_of_text_are_refused_before_an_encoder_decoder_classifies_them(tmp_path: Path):
    datasets = material(tmp_path)
    found = verdict(tmp_path / "trial", "classes", "bart", datasets | {"ended": datasets["classes"]})
    assert found.word == "refused" and "needs as many of them" in found.reason
