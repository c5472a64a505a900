"""Operations on a token in attention, against a count of the products that torch makes and of the pairs of a mask."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from facility.training.attention_operations import attention_operations, sees_the_past_only
from facility.training.weight_operations import weight_operations
from tests.training.families import tiny_config

TOKENS = 16


def build(family: str, factory: str = "AutoModelForCausalLM", **changes: Any) -> Any:
    config = tiny_config(family, **changes)
    return getattr(transformers, factory).from_config(config, attn_implementation="eager").train()


@pytest.mark.parametrize(
    ("family", "factory", "causal"),
    [
        ("llama", "AutoModelForCausalLM", True),
        ("qwen3", "AutoModelForCausalLM", True),
        ("gpt2", "AutoModelForCausalLM", True),
        ("bloom", "AutoModelForCausalLM", True),
        ("deepseek_v3", "AutoModelForCausalLM", True),
        pytest.param("gemma4_text", "AutoModelForCausalLM", True, marks=pytest.mark.slow),
        ("llama", "AutoModelForSequenceClassification", True),
        ("bert", "AutoModelForMaskedLM", False),
        ("albert", "AutoModelForMaskedLM", False),
        ("deberta-v2", "AutoModelForMaskedLM", False),
        ("modernbert", "AutoModelForMaskedLM", False),
    ],
)
def test_attention_multiplies_what_torch_counts_halved_where_it_is_causal(family: str, factory: str, causal: bool):
    """Torch counts the whole square of a block, also what a causal mask hides."""
    # Heads that are wider together than the model, or than those of other layers; groups of layers that share weights.
    wide = {"global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": TOKENS}
    more = {"qwen3": {"head_dim": 24}, "albert": {"num_hidden_groups": 2}, "gemma4_text": wide}.get(family, {})
    model = build(family, factory, **more)
    ids = torch.randint(2, 100, (1, TOKENS))
    labels = torch.tensor([1]) if "Sequence" in factory else ids
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=labels).loss.backward()
    found = counter.get_flop_counts()["Global"]
    products = sum(count for operation, count in found.items() if "bmm" in str(operation)) / TOKENS
    assert sees_the_past_only(model) is causal
    assert attention_operations(model, TOKENS) == products * (0.5 if causal else 1)
    if "deepseek" not in family:  # torch does not count the products of its fused experts
        norms = 6 * sum(one.numel() for one in model.parameters() if one.dim() < 2)
        assert weight_operations(model) - norms == sum(found.values()) / TOKENS - products, "positions are looked up"


def seen(tokens: int, *, before: int, after: int = 0) -> float:
    """Mean number of positions that a token sees, by brute force: of those so far before it and after it."""
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    return float(((distance <= before) & (-distance <= after)).sum()) / tokens


@pytest.mark.parametrize("tokens", [64, 1024])
def test_a_token_sees_no_more_than_its_window(tokens: int):
    width, window, layers = 32, 100, 4
    whole = seen(tokens, before=tokens)
    windowed = {"sliding_window": window}
    every = attention_operations(build("mistral", **windowed), tokens)
    assert every == pytest.approx(12 * width * layers * seen(tokens, before=window - 1), rel=0.02)
    some = attention_operations(build("gemma2", **windowed), tokens)
    expected = 12 * width * (2 * seen(tokens, before=window - 1) + 2 * whole)
    assert some == pytest.approx(expected, rel=0.02)
    both = attention_operations(build("modernbert", "AutoModelForMaskedLM", local_attention=2 * window), tokens)
    expected = 12 * width * (2 * seen(tokens, before=window, after=window) + 2 * tokens)
    assert both == pytest.approx(expected, rel=0.02)


def test_layers_that_attend_to_nothing_ask_for_nothing():
    assert attention_operations(build("mamba"), TOKENS) == 0
    mixed = build("qwen3_next")
    assert mixed.config.layer_types.count("full_attention") == 1
    assert attention_operations(mixed, TOKENS) == 6 * 32 * TOKENS


def test_images_are_seen_whole_and_blocks_of_unlike_lengths_are_not_known():
    patches = build("vit", "AutoModelForImageClassification", image_size=8, patch_size=4)
    assert attention_operations(patches, 5) == 12 * 32 * 4 * 5
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2]}
    merging = transformers.AutoModelForImageClassification.from_config(transformers.SwinConfig(window_size=4, **sizes))
    assert math.isnan(attention_operations(merging, 257))
