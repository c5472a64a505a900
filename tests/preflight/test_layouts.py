"""`crossfed check` refuses what the jobs would refuse of a model in a facility's layout, in their words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.config.federation import read_federation
from coordinator.preflight.coordinator import failing_here
from coordinator.preflight.fitting import check_fitting
from tests.pico import save_pico
from tests.training.families import save_tiny
from tests.training.family_trial import save_family
from tests.training.images import save_image_model

OWN = "trainer: {module: mine}\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "experts": save_tiny(folder / "experts", "qwen3_moe"),
        "balanced": save_tiny(folder / "balanced", "qwen3_moe", output_router_logits=True),
        "resnet": save_image_model(folder / "resnet", "resnet"),
        "vit": save_image_model(folder / "vit", "vit"),
        "reformer": save_family(folder / "reformer", "causal", "reformer"),
        "mamba": save_tiny(folder / "mamba", "mamba"),
        "bloom": save_tiny(folder / "bloom", "bloom"),
        "wide": save_pico(folder / "wide", hidden_size=64),
    }


@pytest.mark.parametrize(
    ("model", "training", "more", "told"),
    [
        ("balanced", "layout: {stages: 2}, ranks: 2", "", "needs the routers of all blocks"),
        ("balanced", "layout: {stages: 2, plan: ~/plan.json}, ranks: 2", "", ""),
        ("balanced", "layout: {stages: 2}, ranks: 2", OWN, ""),
        ("balanced", "ranks: 2", "", ""),
        ("balanced", "steps: 1", "privacy: {differential: {epsilon: 8, delta: 1.0e-5}}\n", "no gradient is of one"),
        ("experts", "layout: {stages: 2}, ranks: 2", "", ""),
        ("resnet", "layout: {stages: 2}, ranks: 2", "", "it normalises over the batch"),
        ("resnet", "layout: {activation_checkpointing: full}", "", "count every batch twice"),
        ("resnet", "lora: {rank: 2, targets: [convolution]}", "", "train the whole model"),
        ("resnet", "ranks: 2", "", ""),
        ("vit", "layout: {stages: 2, activation_checkpointing: full}, ranks: 2", "", ""),
        ("reformer", "ranks: 2", "", "uses weights of a block without calling the block"),
        ("reformer", "ranks: 2, layout: {sharding: NO_SHARD}", "", ""),
        ("reformer", "ranks: 2, layout: {stages: 3}", "", ""),  # another row says that this cannot be
        ("reformer", "lora: {rank: 2}", "", "no gradient of ReformerModelWithLMHead's loss reaches what is trained"),
        ("reformer", "lora: {rank: 2, modules_to_save: [lm_head]}, ranks: 2", "", ""),
        ("reformer", "steps: 1", "", ""),
        ("bloom", "lora: {rank: 2, quantize_base: nf4}", "", "has 32 inputs, expected a multiple of 64"),
        ("mamba", "lora: {rank: 2, quantize_base: fp4}", "", "kernels of a mamba model use weights without calling"),
        ("wide", "lora: {rank: 2, quantize_base: nf4}", "", ""),
    ],
)
def test_a_model_that_jobs_would_refuse_in_their_layout_is_told_before_a_job(
    tmp_path: Path, models: dict[str, Path], model: str, training: str, more: str, told: str
):
    if model in ("resnet", "vit"):
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "dataset.json").write_text(json.dumps({"task": "image-classification"}))
    path = tmp_path / "federation.yml"
    path.write_text(
        f"name: f\nmodel: {models[model]}\nrounds: 1\n{more}facilities:\n"
        f"  - {{name: far, dataset: d, training: {{{training}}}}}\n"
    )
    rows = [row for row in failing_here(read_federation(path)) if row.check != "adapters"]
    assert [(row.subject, row.check) for row in rows] == ([("far", "layout")] if told else [])
    assert not told or told in rows[0].found


@pytest.mark.parametrize(
    ("model", "dataset", "more", "told"),
    [
        ("bloom", {"task": "preference"}, "", "preference needs documents that are kept apart"),
        ("bloom", {"task": "causal-lm", "documents": "separate"}, "", "takes no positions, so documents that share"),
        ("bloom", {"task": "chat", "documents": "separate"}, "", "with --documents padded (one document a block)"),
        ("bloom", {"task": "chat", "documents": "padded"}, "", ""),
        ("bloom", {"task": "causal-lm"}, "", ""),
        ("bloom", {"task": "chat", "documents": "separate"}, OWN, ""),
        ("experts", {"task": "chat", "documents": "separate"}, "", ""),
    ],
)
def test_documents_that_a_model_cannot_keep_apart_are_told_before_a_job(
    tmp_path: Path, models: dict[str, Path], model: str, dataset: dict[str, str], more: str, told: str
):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "dataset.json").write_text(json.dumps(dataset | {"block_tokens": 16}))
    path = tmp_path / "federation.yml"
    facility = "facilities:\n  - {name: far, dataset: d}\n"
    path.write_text(f"name: f\nmodel: {models[model]}\nrounds: 1\n{more}{facility}")
    rows = failing_here(read_federation(path))
    assert [(row.subject, row.check) for row in rows] == ([("far", "documents")] if told else [])
    assert not told or told in rows[0].found


def test_documents_at_another_place_are_told_of_as_its_probe_says(tmp_path: Path, models: dict[str, Path]):
    path = tmp_path / "federation.yml"
    path.write_text(
        f"name: f\nmodel: {models['bloom']}\nrounds: 1\nfacilities:\n"
        "  - {name: far, dataset: d, deployment: {type: slurm, host: h, workdir: /w, template: slurm}}\n"
    )
    federation = read_federation(path)
    told = [row for row in check_fitting(federation, {"far": "chat"}, {"far": 16}) if row.verdict == "fail"]
    assert [(row.subject, row.check) for row in told] == [("far", "documents")]
    assert all(row.verdict == "ok" for row in check_fitting(federation, {"far": "chat"}, {"far": 0}))
