"""A family cut into two stages that run one after the other in one process, against the whole model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from facility.exchange.errors import CrossFedError
from facility.training.data.tasks import CausalLM, Classification, MaskedLM, Task
from facility.training.model import choose_attention
from facility.training.parallel.split import Stage, inspect_model
from facility.training.parallel.structure import ModelStructure
from tests.training.family_trial import LARGEST, Verdict, factory, sentence
from tests.training.shrink import tiny

TOKENS = 16
SAME = 1e-4
"""Largest difference of a logit, over the largest; ten times as much of a gradient, over its tensor's largest."""
TASKS: dict[str, Task] = {
    "causal": CausalLM(),
    "masked": MaskedLM(0, 1, ()),
    "classes": Classification(token_types=False),
}


def config_of(task: str, family: str) -> Any:
    config = tiny(family, is_decoder=task == "causal", num_labels=3, pad_token_id=0)
    config.use_cache = False
    return config


def staged(task: str, family: str, *, cut: int = 0) -> Verdict:
    """Whether two stages have the logits and gradients of the model. `cut`: the second's first unit; 0: the middle."""
    try:
        with torch.device("meta"):
            count = sum(one.numel() for one in factory(task).from_config(config_of(task, family)).parameters())
        if count > LARGEST:
            return Verdict("needs", f"the tiny one still has {count:,} parameters")
    except Exception as error:
        return Verdict("needs", sentence(error))
    try:
        kind = TASKS[task].factory
        attention = choose_attention(config_of(task, family), kind, torch.device("cpu"), torch.float32)
        structure = inspect_model(config_of(task, family), kind, attention.name, TOKENS)
    except CrossFedError as error:
        return Verdict("refused", str(error))
    except ValueError as error:  # transformers' own words, where it cannot build the model with this attention
        return Verdict("needs", sentence(error))
    ids = torch.arange(2, 2 + TOKENS).repeat(2, 1)
    ids[1] += 40
    try:
        whole = drawn(factory(task).from_config(config_of(task, family), attn_implementation=attention.name))
        stages = [copy.deepcopy(whole) for _ in range(2)]  # before it keeps anything of a pass, as RecurrentGemma does
        logits = whole(input_ids=ids).logits
    except Exception as error:
        return Verdict("needs", sentence(error))
    weights = torch.randn_like(logits)
    (logits * weights).sum().backward()
    try:
        found = run_stages(stages, structure, ids, weights, cut or structure.units // 2, pools=task == "classes")
    except Exception as error:
        return Verdict("wrong", f"ends in a traceback: {sentence(error)}")
    apart = float((found - logits).detach().abs().max() / logits.detach().abs().max())
    if not apart < SAME:
        return Verdict("wrong", f"logits differ by {apart:.1e}")
    apart, where = gradients_apart(whole, stages)
    return Verdict("works") if apart < 10 * SAME else Verdict("wrong", f"gradients of {where} differ by {apart:.1e}")


def drawn(model: nn.Module) -> nn.Module:
    """Without dropout; norms and biases not at the values that they begin with."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.float().eval()


def run_stages(
    models: list[nn.Module],
    structure: ModelStructure,
    ids: torch.Tensor,
    weights: torch.Tensor,
    cut: int,
    *,
    pools: bool,
) -> torch.Tensor:
    """Forward and backward of both stages, cut out of two copies of the model; the last one's logits."""
    first = Stage(models[0], structure, 0, cut, torch.float32)
    last = Stage(models[1], structure, cut, structure.units, torch.float32)
    sent = first(ids)
    received = sent.detach().clone().requires_grad_()
    logits = last(received, token_ids=ids) if pools else last(received)
    (logits * weights).sum().backward()
    if not torch.equal(received, sent):
        raise AssertionError("the last stage has changed what it received")
    sent.backward(received.grad)
    return logits


def gradients_apart(whole: nn.Module, stages: list[nn.Module]) -> tuple[float, str]:
    """Largest difference of a gradient over its tensor's largest, and whose; a tied weight's parts are added up."""
    held = [dict(stage.named_parameters(remove_duplicate=False)) for stage in stages]
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    worst = (0.0, "")
    for parameter, known in names.items():
        if parameter.grad is None or not parameter.numel() or (largest := float(parameter.grad.abs().max())) < 1e-7:
            continue
        parts = {id(own[name]): own[name].grad for own in held for name in known if name in own}
        total = sum(part for part in parts.values() if part is not None)
        worst = max(worst, (float((total - parameter.grad).abs().max()) / largest, known[0]))
    return worst
