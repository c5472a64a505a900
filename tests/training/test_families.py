"""Law: one step of the trainer is a plain step of transformers' own model (with adapters: of peft's)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.family_trial import families, verdict
from tests.training.federation import write_dataset, write_masked_words
from tests.training.test_tasks import write_classes

FEW = {"causal": ["gemma2", "qwen3_moe"], "masked": ["bert"], "classes": ["qwen3"]}
"""Unlike ones."""


@pytest.mark.parametrize("task", list(FEW))
def test_unlike_families_train_as_transformers_and_peft_do(tmp_path: Path, task: str):
    datasets = {
        "causal": write_dataset(tmp_path / "causal", validation=4),
        "masked": write_masked_words(tmp_path / "masked"),
        "classes": write_classes(tmp_path / "classes"),
    }
    for family in FEW[task]:
        assert family in families(task)
        for lora in (False, True):
            found = verdict(tmp_path / "trial", task, family, datasets, lora=lora)
            assert found.word == "works", (family, lora, found)
