"""Law: one step of the trainer is a plain step of transformers' own model (with adapters: of peft's)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed import StayingRanks
from tests.training.family_layouts import layout_verdict, one_rank
from tests.training.family_page import TITLES, Row, lines_of, page, table_line
from tests.training.family_table import PAGE, material
from tests.training.family_trial import families, verdict

FEW = {
    "causal": ["gemma2", "qwen3_moe", "mamba", "bloom", "phimoe", "bart", "gemma4_text"],
    "masked": ["bert", "deberta-v2", "mobilebert", "mpnet"],
    "classes": ["qwen3", "bart", "distilbert", "deepseek_v3", "perceiver"],
    "images": ["deit", "swin"],
}
"""Unlike ones: of experts, without attention, encoder-decoders, and those that were once trained wrongly."""


@pytest.mark.parametrize(
    "task", ["causal", *(pytest.param(task, marks=pytest.mark.slow) for task in ("masked", "classes", "images"))]
)
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
        ("causal", "reformer", True, "no gradient of ReformerModelWithLMHead's loss reaches what is trained"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_its_reason(
    tmp_path: Path, task: str, family: str, lora: bool, why: str
):
    found = verdict(tmp_path / "trial", task, family, material(tmp_path), lora=lora)
    assert found.word == "refused" and re.search(why, found.reason), found


@pytest.mark.slow
def test_layouts_that_once_ended_in_a_traceback(tmp_path: Path):
    """XLM-RoBERTa's head comes before the embedding that it is tied to; Funnel's blocks are lists of layers, which no
    one calls; Zamba2's blocks share their attention; SqueezeBERT calls `forward` of its blocks, and Reformer's own
    backward pass parts of them, so that nothing gathers their weights."""
    datasets = material(tmp_path)
    cases = (
        ("masked", "xlm-roberta", "pipeline", "works"),
        ("masked", "funnel", "sharded", "works"),
        ("causal", "zamba2", "sharded", "works"),
        ("causal", "reformer", "sharded", "calling the block"),
        ("masked", "squeezebert", "sharded", "calling the block"),
    )
    with StayingRanks(one_rank, 2) as ranks:
        for task, family, layout, word in cases:
            trial = tmp_path / family
            assert verdict(trial, task, family, datasets).word == "works"
            found = layout_verdict(ranks, trial, datasets[task], layout)
            assert word in f"{found.word}: {found.reason}", (family, found)


def test_rows_without_an_end_of_text_are_refused_before_an_encoder_decoder_classifies_them(tmp_path: Path):
    datasets = material(tmp_path)
    found = verdict(tmp_path / "trial", "classes", "bart", datasets | {"ended": datasets["classes"]})
    assert found.word == "refused" and "needs as many of them" in found.reason


def test_a_family_of_several_tasks_is_read_from_the_table_of_each():
    rows: list[Row] = [
        {"task": "causal", "family": "bart", "one": ["works", ""], "pipeline": ["works", ""]},
        {"task": "classes", "family": "bart", "one": ["works", ""], "pipeline": ["refused", "why"]},
    ]
    for row in rows:
        assert lines_of(page(rows), row["task"]) == {"bart": table_line(row)}
    written = {task: lines_of(PAGE.read_text(), task) for task in TITLES}
    assert min(map(len, written.values())) > 20 and written["causal"]["bart"] != written["classes"]["bart"]


def test_the_table_is_of_the_pinned_transformers_and_names_no_wrong_result():
    told = PAGE.read_text()
    pinned = re.search(r"^transformers==(\S+)", (PAGE.parents[2] / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and f"of transformers {pinned[1]} " in told
    assert "WRONG" not in told
