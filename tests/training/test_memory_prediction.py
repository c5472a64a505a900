"""What a rank will need, worked out by hand; measured beside it by tests/bench/predictions.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest

from facility.exchange.messages.layout import LayoutSettings, LoraSettings
from facility.exchange.messages.settings import TrainingSettings
from facility.training import lora
from facility.training.memory import predicted_bytes
from tests.pico import pico_config

HIDDEN, INNER, LAYERS, VOCABULARY, TOKENS = 32, 64, 4, 128, 10 * 16


def predicted(*, family: str = "llama", adapters: LoraSettings | None = None, **training: Any) -> dict[str, int]:
    import torch
    from transformers import AutoModelForCausalLM

    config = pico_config(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    settings = TrainingSettings(**training)
    if adapters is not None:
        lora.inject(model, adapters, classifies=False)
    layout = SimpleNamespace(
        grid=SimpleNamespace(place=lambda rank: (0, 0, 0), stages=1, shards=1, replicas=1),
        units=(),
        shape=SimpleNamespace(micro_batch_sequences=10, micro_batches=(1,)),
        block_tokens=16,
        schedule="1f1b",
    )
    return predicted_bytes(model, None, layout, SimpleNamespace(rank=0), settings, config)  # type: ignore[arg-type]


def test_a_whole_llama():
    found = predicted()
    # r = 2: 11 of norms, residuals and attention, and 4 r of the gated network
    assert found["activations"] == TOKENS * LAYERS * HIDDEN * (11 + 4 * 2) * 4
    assert found["logits"] == VOCABULARY * TOKENS * 12
    assert found["gradients"] == found["weights"] and found["optimizer"] == 2 * found["weights"]


def test_adapters_keep_the_inputs_and_outputs_of_their_layers():
    found = predicted(adapters=LoraSettings(rank=2, targets=["q_proj", "down_proj"]))
    beside = 1.5 * (HIDDEN + HIDDEN) + 0.5 * (HIDDEN + INNER)
    assert found["activations"] == TOKENS * LAYERS * (HIDDEN * (7 + 3 * 2) + beside) * 4
    assert found["gradients"] < found["weights"] / 20
    every = predicted(adapters=LoraSettings(rank=2))
    assert every["activations"] > predicted()["activations"] > found["activations"]


@pytest.mark.parametrize(("checkpointing", "values"), [("full", 1), ("selective", 10)])
def test_what_is_computed_again_is_not_kept(checkpointing: Literal["full", "selective"], values: int):
    found = predicted(layout=LayoutSettings(activation_checkpointing=checkpointing))
    assert found["activations"] == TOKENS * LAYERS * HIDDEN * values * 4


def test_a_block_of_which_no_more_is_known():
    assert predicted(family="gpt2")["activations"] == TOKENS * LAYERS * HIDDEN * 17 * 4


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("rank", [0, 2])
def test_half_precision_has_a_copy_of_what_is_multiplied(checkpointing: Literal["none", "full"], rank: int):
    """Of every linear layer from forward to backward; of frozen ones not where they run again."""
    adapters = LoraSettings(rank=rank, targets=["q_proj"]) if rank else None
    layout = LayoutSettings(activation_checkpointing=checkpointing)
    assert "weights in half precision" not in predicted(adapters=adapters, layout=layout)
    found = predicted(adapters=adapters, layout=layout, compute_dtype="bfloat16")
    own = LAYERS * rank * 2 * HIDDEN
    embedding, norms = VOCABULARY * HIDDEN, (2 * LAYERS + 1) * HIDDEN
    linear = found["weights"] // 4 - embedding - norms
    assert found["weights in half precision"] == 2 * (own if rank and checkpointing == "full" else linear)


def test_half_precision_keeps_half():
    assert predicted(compute_dtype="bfloat16")["activations"] * 2 == predicted()["activations"]
