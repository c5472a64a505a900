"""`crossfed check` refuses what the jobs would refuse of a model in a facility's layout, in their words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.config.federation import read_federation
from coordinator.preflight.coordinator import failing_here
from tests.training.families import save_tiny
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
