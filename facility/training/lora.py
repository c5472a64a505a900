"""Low-rank adapters: injected by peft into the skeleton, the only thing trained, kept and sent.

An update holds adapter tensors under peft's names (`base_model.model.<layer>.lora_A.weight`) beside an
`adapter_config.json`; its manifest says `encoding: lora`. The received model is either a checkpoint (with or without
adapter tensors in it), or adapters alone, where `training.lora.base` names a base model that never travels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from facility.exchange.checkpoints.adapters import PREFIX, is_adapter
from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.layout import LoraSettings
from facility.training.blocks import find_blocks
from facility.training.seeds import derive
from facility.training.shards import LocalShard, load_shards

STATE_SPACE = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Families whose kernels use the weight of `out_proj` directly, so that peft refuses an adapter on it."""


def targets_of(model: nn.Module, settings: LoraSettings) -> list[str]:
    """Full names of the layers that get an adapter. Raises `ConfigurationError` where none fits."""
    blocks, _ = find_blocks(model)
    linear = [
        name
        for name, module in model.named_modules()
        if name.startswith(blocks + ".") and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    ]
    family = getattr(getattr(model, "config", None), "model_type", "")
    if not settings.targets and family in STATE_SPACE:
        linear = [name for name in linear if name.rpartition(".")[2] != "out_proj"]
    chosen = [
        name
        for name in linear
        if not settings.targets or any(name == t or name.endswith("." + t) for t in settings.targets)
    ]
    if family in STATE_SPACE and any(name.rpartition(".")[2] == "out_proj" for name in chosen):
        raise ConfigurationError(
            f"training.lora.targets {settings.targets} name out_proj, whose weight a {family} model uses without "
            "calling the layer: an adapter there would do nothing; name others, such as in_proj and x_proj"
        )
    if not chosen:
        ends = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigurationError(
            f"training.lora.targets {settings.targets} fit no linear layer of {blocks}; their names end in {ends}"
        )
    return chosen


def inject(model: nn.Module, settings: LoraSettings) -> None:
    """Add adapters on the meta device; nothing else is trained from here on."""
    import warnings

    from peft import LoraConfig, inject_adapter_in_model

    configuration = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft takes floats too
        lora_dropout=settings.dropout,
        target_modules=targets_of(model, settings),
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inject_adapter_in_model(configuration, model, low_cpu_mem_usage=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def name_on_disk(name: str) -> str:
    """Of a parameter of a model with adapters: peft's name for an adapter, the plain name for the rest."""
    if is_adapter(name):
        return PREFIX + name.replace(".default.", ".")
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def load_adapters(parts: Sequence[LocalShard], received: Checkpoint, seed: int) -> str:
    """Fill the adapters from the received model, or begin them: A uniform as peft does, B zero; says which.

    A beginning is drawn from the federation's seed and the name: every facility begins with the same.
    """
    adapters = [part for part in parts if part.name.startswith(PREFIX)]
    heads = sorted({part.name.partition(".")[0] for part in parts} & {"score", "classifier"})
    note = f"; the classification head ({heads[0]}) stays as received: only adapters are trained" if heads else ""
    if all(part.name in received.tensors for part in adapters):
        load_shards(adapters, received)
        return f"{len(adapters)} adapter tensors received{note}"
    for part in adapters:
        if ".lora_B." in part.name:
            part.tensor.zero_()
            continue
        bound = 1 / math.sqrt(part.shape[1])  # kaiming_uniform_(a=sqrt(5)) of an (r, in) matrix
        generator = torch.Generator().manual_seed(derive(seed, "lora", part.name))
        whole = (torch.rand(part.shape, generator=generator) * 2 - 1) * bound
        part.tensor.copy_(whole[part.first : part.first + part.tensor.shape[0]])
    return f"{len(adapters)} adapter tensors begun from the federation's seed{note}"
