"""Law: the router's auxiliary loss is trained as the model defines it, and only where its config.json asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.families import save_tiny
from tests.training.federation import largest_difference, weights, write_dataset
from tests.training.layouts import arguments, rounds_in

RATE, EPSILON, COEFFICIENT = 1e-2, 1e-2, 0.5
ONE_STEP: dict[str, Any] = {
    "steps": 1,
    "batch_sequences": 8,
    "learning_rate": RATE,
    "epsilon": EPSILON,
    "schedule": "constant",
    "clip_norm": 0.0,
}


def plain_step(model: Path, dataset: Path, micro_batches: int) -> dict[str, torch.Tensor]:
    """transformers' own loss of the whole dataset, which is one batch, in micro-batches of equal size."""
    from transformers import AutoModelForCausalLM

    from facility.dataset import open_dataset

    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(found.parameters(), lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0)
    ids = torch.from_numpy(open_dataset(dataset).split("train")[:].astype("int64"))
    for piece in ids.chunk(micro_batches):
        (found(input_ids=piece, labels=piece).loss / micro_batches).backward()
    optimizer.step()
    return found.state_dict()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_one_step_is_transformers_own_with_and_without_the_auxiliary_loss(tmp_path: Path, family: str):
    from transformers import AutoModelForCausalLM

    dataset = write_dataset(tmp_path / "data", train=8)
    asked = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    models = {
        "off": save_tiny(tmp_path / "off", family),
        "on": save_tiny(tmp_path / "on", family, **asked),
    }
    rounds_in(
        [(name, arguments(tmp_path / f"{name}-run", model, dataset, **ONE_STEP)) for name, model in models.items()]
    )
    for name, model in models.items():
        expected = plain_step(model, dataset, 1)
        update = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-run/out", dtype=torch.float32).state_dict()
        assert max((expected[key] - update[key]).abs().max().item() for key in expected) < 2e-6, name
    routers = [key for key in weights(models["on"]) if "gate" in key and "proj" not in key]
    apart = largest_difference(tmp_path / "off-run/out", tmp_path / "on-run/out")
    assert routers and apart > 1e-4, "the auxiliary loss moves the routers"


@pytest.mark.slow
def test_micro_batches_and_ranks_have_the_mean_of_their_auxiliary_losses(tmp_path: Path):
    dataset = write_dataset(tmp_path / "data", train=8)
    model = save_tiny(tmp_path / "model", "mixtral", output_router_logits=True, router_aux_loss_coef=COEFFICIENT)
    cut = arguments(tmp_path / "cut", model, dataset, **ONE_STEP, micro_batch_sequences=4)
    rounds_in([("cut", cut)])
    rounds_in([("ranks", arguments(tmp_path / "ranks", model, dataset, **ONE_STEP))], ranks=2)
    assert largest_difference(tmp_path / "cut/out", tmp_path / "ranks/out") < 2e-6
    refused = arguments(tmp_path / "stages", model, dataset, **ONE_STEP, layout={"stages": 2})
    said = rounds_in([("stages", refused)], ranks=2, expect=2)
    assert all("output_router_logits" in text for text in said["stages"])
