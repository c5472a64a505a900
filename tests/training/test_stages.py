"""Law: stages of a model, one after the other, are the model, and leave what they are given as it was."""

from __future__ import annotations

import re

import pytest
import torch

from facility.exchange.errors import InputError
from facility.training.model import choose_attention
from facility.training.parallel.split import Stage, inspect_model
from facility.training.parallel.structure import check_sharing
from tests.training.family_page import TITLES
from tests.training.family_trial import Verdict, factory, families
from tests.training.stage_trial import TASKS, TOKENS, config_of, staged

BESIDE = (("causal", "olmo"), ("causal", "llama"), ("classes", "llama"))


@pytest.mark.parametrize(
    ("task", "family", "cut"),
    [
        *(("causal", "olmo", cut) for cut in (1, 3)),
        *(("causal", family, 2) for family in ("ctrl", "nemotron_h")),
        ("classes", "bert", 2),
        *(pytest.param(*case, 2, marks=pytest.mark.slow) for case in BESIDE),
    ],
)
def test_two_stages_have_the_gradients_of_the_model(task: str, family: str, cut: int):
    """CTRL scales its embeddings in place, where a stage has another's activation; OLMo's last norm has no parameters.

    `cut`: the unit that the second stage begins with.
    """
    assert staged(task, family, cut=cut) == Verdict("works")


@pytest.mark.parametrize(
    ("task", "family", "why"),
    [
        ("causal", "zamba2", "are one weight"),
        ("masked", "neomme", "take embeddings beside the activation"),
        ("masked", "albert", "runs albert.encoder.albert_layer_groups.* 2 times"),
        ("causal", "roformer", "one that holds units 2 to 3 alone cannot run"),
    ],
)
def test_what_only_seems_to_be_a_chain_of_blocks_is_refused(task: str, family: str, why: str):
    found = staged(task, family)
    assert found.word == "refused" and re.search(why, found.reason), found


def test_blocks_that_share_a_weight_are_refused():
    model = factory("causal").from_config(config_of("causal", "llama"))
    check_sharing(model, "model.layers")
    model.model.layers[1].mlp.up_proj = model.model.layers[0].mlp.up_proj
    with pytest.raises(InputError, match="layers.0.mlp.up_proj.weight and model.layers.1.mlp.up_proj.weight are one"):
        check_sharing(model, "model.layers")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(set(TITLES) - {"images"}))
def test_no_family_is_trained_wrongly_in_stages(task: str):
    """Each family has the whole model's logits and gradients, or is refused before it is cut."""
    found = {family: staged(task, family) for family in families(task)}
    assert {family: one.reason for family, one in found.items() if one.word == "wrong"} == {}
    assert sum(one.word == "works" for one in found.values()) > len(found) / 2


def test_a_stage_without_gradients_leaves_what_it_receives():
    """Where nothing is trained, an operation in place would raise no error."""
    config, kind = config_of("causal", "ctrl"), TASKS["causal"].factory
    attention = choose_attention(config, kind, torch.device("cpu"), torch.float32)
    structure = inspect_model(config, kind, attention.name, TOKENS)
    stage = Stage(factory("causal").from_config(config).float(), structure, 2, structure.units, torch.float32)
    received = torch.randn(1, TOKENS, structure.hidden)
    before = received.clone()
    with torch.no_grad():
        stage(received)
    assert torch.equal(received, before)
