"""Low-rank adapters: injected by peft into the skeleton, the only thing trained, kept and sent.

An update holds adapter tensors under peft's names (`base_model.model.<layer>.lora_A.weight`, and
`base_model.model.<module>.weight` of a module that is trained whole) in `adapter_model.safetensors` beside an
`adapter_config.json`, so that peft loads it; its manifest says `encoding: lora`. The received model is either a
checkpoint (with or without adapter tensors in it), or adapters alone, where `training.lora.base` names a base model
that never travels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from facility.exchange.checkpoints.adapters import HEADS, PREFIX, is_adapter, is_factor, saves, targeted
from facility.exchange.checkpoints.begun_adapters import begun_factor
from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.checkpoints.conversion import Conversion
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.messages.layout import LoraSettings
from facility.training.blocks import find_blocks
from facility.training.shards import LocalShard, load_shards

STATE_SPACE = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Families whose kernels use the weight of `out_proj` directly, so that peft refuses an adapter on it."""


def is_linear(module: nn.Module) -> bool:
    """Whether peft's adapter can stand beside this layer.

    Routers of experts inherit from `Linear` and answer with indices and weights: those are asked, without memory.
    """
    if not isinstance(module, nn.Linear):
        return type(module).__name__ == "Conv1D"
    if type(module).forward is nn.Linear.forward:
        return True
    try:
        answer = module(torch.empty(2, module.in_features, device="meta"))
    except Exception:
        return False
    return isinstance(answer, torch.Tensor) and tuple(answer.shape) == (2, module.out_features)


def names_of_experts(family: str) -> frozenset[str]:
    """Ends of names that peft takes for the experts of such a family, whatever layer they name.

    Published before transformers fused its experts, adapters name their projections; peft reads those names as the
    fused parameters, so that a shared expert's layer of the same name cannot be named.
    """
    from peft.utils import transformers_weight_conversion as table

    pattern = table._MODEL_TO_CONVERSION_PATTERN.get(family, "")
    return frozenset(table._MOE_TARGET_MODULE_MAPPING.get(pattern, ()))


def targets_of(model: nn.Module, settings: LoraSettings) -> list[str]:
    """Full names of the layers that get an adapter. Raises `ConfigurationError` where none fits."""
    blocks, _ = find_blocks(model)
    family = getattr(getattr(model, "config", None), "model_type", "")
    inside = [(name, module) for name, module in model.named_modules() if name.startswith(blocks + ".")]
    linear = [name for name, module in inside if is_linear(module)]
    if not linear:
        kinds = sorted(
            {type(module).__name__ for _, module in inside if next(module.parameters(False), None) is not None}
        )
        raise ConfigurationError(
            f"training.lora.rank is {settings.rank}, but no layer in {blocks} of this {family} model is a plain linear "
            f"layer, which adapters need: they are {', '.join(kinds)}; train the whole model (lora.rank 0)"
        )
    taken = names_of_experts(family)
    if named := sorted({target for target in settings.targets if target.rpartition(".")[2] in taken}):
        raise ConfigurationError(
            f"training.lora.targets name {named}: peft takes {', '.join(sorted(taken))} of a {family} model for its "
            "fused experts; name other layers"
        )
    linear = [name for name in linear if name.rpartition(".")[2] not in taken]
    if not settings.targets and family in STATE_SPACE:
        linear = [name for name in linear if name.rpartition(".")[2] != "out_proj"]
    chosen = [name for name in linear if not settings.targets or targeted(name, settings.targets)]
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


def inject(model: nn.Module, settings: LoraSettings, *, classifies: bool) -> None:
    """Add adapters on the meta device; beside them only `modules_to_save` are trained from here on.

    `classifies`: the model has a classifier's head, which is saved unless others are named. Raises
    `ConfigurationError`.
    """
    import warnings

    from peft import LoraConfig, inject_adapter_in_model

    configuration = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft takes floats too
        lora_dropout=settings.dropout,
        target_modules=targets_of(model, settings),
        use_rslora=settings.rslora,
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inject_adapter_in_model(configuration, model, low_cpu_mem_usage=True)
    wanted = settings.modules_to_save or (HEADS if classifies else ())
    saved = [name for name, _ in model.named_parameters() if not is_factor(name) and saves_parameter(name, wanted)]
    for name in settings.modules_to_save:
        if not any(saves_parameter(found, [name]) for found in saved):
            raise ConfigurationError(
                f"training.lora.modules_to_save names {name!r}, which is not a module of it outside its adapters; "
                f"its heads are {', '.join(sorted({n.partition('.')[0] for n, _ in model.named_children()}))}"
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_factor(name) or name in saved)


def saves_parameter(name: str, wanted: Sequence[str]) -> bool:
    """Whether a parameter belongs to a module that is saved; adapted layers have their adapters instead."""
    return ".base_layer." not in name and saves(name.rpartition(".")[0], wanted)


def name_on_disk(name: str) -> str:
    """Of a parameter of a model with adapters: peft's name for a factor, the plain name for the rest."""
    if is_factor(name):
        return PREFIX + name.replace(".default.", ".")
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def load_adapters(
    parts: Sequence[LocalShard],
    received: Checkpoint,
    base: Checkpoint,
    plain: Mapping[str, str],
    seed: int,
    conversion: Conversion | None = None,
) -> str:
    """Fill the adapters from the received model, or begin them: A uniform as peft does, B zero, what is saved whole as
    in the base; says which. `plain`: the base's names of modules that are saved.

    A beginning is drawn from the federation's seed and the name: every facility begins with the same.
    """
    adapters = [part for part in parts if part.name.startswith(PREFIX)]
    saved = [part for part in adapters if not is_factor(part.name)]
    whole = sorted({part.name.removeprefix(PREFIX).rpartition(".")[0] for part in saved})
    note = f"; trained whole: {', '.join(whole)}" if whole else ""
    if all(part.name in received.tensors for part in adapters):
        load_shards(adapters, received)
        return f"{len(adapters)} adapter tensors received{note}"
    if lacking := [part.name for part in adapters if part.name not in received.tensors]:
        if any(map(is_adapter, received.tensors)):
            raise InputError(
                f"{received.directory} holds adapters, but none for {lacking[0]!r} ({len(lacking)} of {len(adapters)} "
                "are missing), which training.lora asks for: name the targets and modules_to_save of those"
            )
    load_shards([dataclasses.replace(part, name=plain[part.name]) for part in saved], base, conversion)
    for part in adapters:
        if not is_factor(part.name):
            continue
        drawn = torch.from_numpy(begun_factor(seed, part.name, part.shape))
        part.tensor.copy_(drawn[part.first : part.first + part.tensor.shape[0]])
    return f"{len(adapters)} adapter tensors begun from the federation's seed{note}"
