"""Law: stages of a model, one after the other, are the model, and leave what they are given as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from facility.training.data.tasks import CausalLM
from facility.training.model import choose_attention
from facility.training.parallel.split import Stage, inspect_model
from tests.training.shrink import tiny

TOKENS = 16


@pytest.mark.parametrize(("family", "cut"), [("ctrl", 2), ("olmo", 1), ("olmo", 2), ("olmo", 3), ("llama", 2)])
def test_two_stages_have_the_gradients_of_the_model(family: str, cut: int):
    """CTRL scales its embeddings in place, where a stage has another's activation; OLMo's last norm has no parameters.

    `cut`: the unit that the second stage begins with.
    """
    config = tiny(family, is_decoder=True, pad_token_id=0, tie_word_embeddings=False)
    task = CausalLM()
    attention = choose_attention(config, task.factory, torch.device("cpu"), torch.float32)
    structure = inspect_model(config, task.factory, attention.name, TOKENS)
    torch.manual_seed(0)
    whole = task.factory.from_config(config).float()
    first, second = (
        Stage(copy.deepcopy(whole), structure, begin, end, torch.float32)
        for begin, end in ((0, cut), (cut, structure.units))
    )
    ids = torch.arange(2, 2 + TOKENS)[None]
    F.cross_entropy(whole(input_ids=ids, use_cache=False).logits[0], ids[0]).backward()

    sent = first(ids)
    received = sent.detach().clone().requires_grad_()
    F.cross_entropy(second(received)[0], ids[0]).backward()
    assert torch.equal(received, sent), "as it came"
    sent.backward(received.grad)
    wanted = {name: one.grad for name, one in whole.named_parameters() if one.grad is not None}
    found = [dict(stage.model.named_parameters()) for stage in (first, second)]
    for name, gradient in wanted.items():
        parts = [held[name].grad for held in found if name in held and held[name].grad is not None]
        torch.testing.assert_close(sum(parts), gradient, rtol=1e-5, atol=1e-7)


def test_a_stage_without_gradients_leaves_what_it_receives():
    """Where nothing is trained, an operation in place would raise no error."""
    config, task = tiny("ctrl", is_decoder=True, pad_token_id=0), CausalLM()
    attention = choose_attention(config, task.factory, torch.device("cpu"), torch.float32)
    structure = inspect_model(config, task.factory, attention.name, TOKENS)
    stage = Stage(task.factory.from_config(config).float(), structure, 2, structure.units, torch.float32)
    received = torch.randn(1, TOKENS, structure.hidden)
    before = received.clone()
    with torch.no_grad():
        stage(received)
    assert torch.equal(received, before)
