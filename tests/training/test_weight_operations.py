"""Operations on a token by a model's weights, against a count of the matrix products that torch makes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.report import read_report
from facility.training import lora
from facility.training.weight_operations import weight_operations
from tests.pico import save_pico
from tests.training.federation import write_dataset
from tests.training.layouts import arguments, rounds_in

SIZE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = 8


def build(family: str, **more: Any) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **SIZE, **HEADS, **more)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


def counted(model: torch.nn.Module, *, products: tuple[str, ...]) -> float:
    """Operations on a token of forward and backward pass in matrix products of weights, without attention's own."""
    ids = torch.randint(SIZE["vocab_size"], (1, TOKENS))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    found = counter.get_flop_counts()["Global"]
    return sum(count for operation, count in found.items() if str(operation) in products) / TOKENS


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_multiplies_where_it_is_the_output_layer_too(tied: bool):
    model = build("llama", tie_word_embeddings=tied)
    norms = 6 * sum(one.numel() for one in model.parameters() if one.dim() < 2)
    assert weight_operations(model) - norms == counted(model, products=("aten.mm",))


def test_a_frozen_weight_has_no_gradient_to_be_made():
    model = build("llama", tie_word_embeddings=False)
    model.enable_input_require_grads()  # as torch would go on to the first block where adapters stand below it
    lora.inject_adapters(model, LoraSettings(rank=2), classifies=False)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if one.is_meta:
                module, _, kind = name.rpartition(".")
                setattr(model.get_submodule(module), kind, torch.nn.Parameter(torch.zeros(one.shape)))
    norms = 4 * sum(one.numel() for one in model.parameters() if one.dim() < 2)
    assert weight_operations(model) - norms == counted(model, products=("aten.mm",))


def test_of_experts_those_count_that_a_token_is_given_to():
    chosen = {"num_local_experts": 4, "num_experts_per_tok": 1, "tie_word_embeddings": False}
    model = build("mixtral", **chosen)
    experts = sum(one.numel() for name, one in model.named_parameters() if ".experts." in name)
    whole = weight_operations(build("mixtral", **chosen | {"num_experts_per_tok": 4}))
    assert whole - weight_operations(model) == 6 * experts * 3 / 4
    model.config.num_experts_per_tok = 0
    assert math.isnan(weight_operations(model))


def test_layers_that_share_a_weight_multiply_by_it_once_each():
    """As the attention of Zamba2, whose layers are modules of their own around the same weights."""
    first, second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    assert weight_operations(torch.nn.Sequential(first, second)) == 2 * 6 * 16


def test_a_round_reports_them(tmp_path: Path):
    dataset = write_dataset(tmp_path / "data")
    rates = {}
    for tied in (False, True):
        model = save_pico(tmp_path / f"model-{tied}", tie_word_embeddings=tied)
        rounds_in([("one", arguments(tmp_path / str(tied), model, dataset))])
        report = read_report(tmp_path / str(tied) / "out")
        rates[tied] = report.details["flops_per_second"] * report.seconds.train / report.tokens
    assert rates[True] == pytest.approx(rates[False], rel=1e-6), "the same products, whether or not a weight is in two"
