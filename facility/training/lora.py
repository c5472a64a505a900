"""Low-rank adapters: injected by peft into the skeleton, the only thing trained, kept and sent.

An update holds adapter tensors under peft's names (`base_model.model.<layer>.lora_A.weight`, and
`base_model.model.<module>.weight` of a module that is trained whole) in `adapter_model.safetensors` beside an
`adapter_config.json`, so that peft loads it; its manifest says `encoding: lora`. The received model is either a
checkpoint (with or without adapter tensors in it), or adapters alone, where `training.lora.base` names a base model
that never travels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from facility.exchange.checkpoints.adapters import (
    HEADS,
    MAGNITUDE,
    PREFIX,
    is_added,
    is_factor,
    is_magnitude,
    targeted,
)
from facility.exchange.checkpoints.tied_modules import refusal_of_tied, saves_parameter
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.layout import LoraSettings
from facility.training.blocks import find_blocks

STATE_SPACE = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Families whose kernels use the weight of `out_proj` directly, so that peft refuses an adapter on it."""

RENAMED = {"laguna": ("shared_experts",)}
"""Modules of families whose own names transformers' table of published names changes too, so that adapters of theirs
are looked for where none is: its pattern `mlp.shared_expert.` fits Laguna's `mlp.shared_experts`."""


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
    """Full names of the layers that get an adapter. Raises `ConfigurationError` where a target fits none."""
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
    lost = [name for name in linear if targeted(name.rpartition(".")[0], RENAMED.get(family, ()))]
    if named := [name for name in lost if settings.targets and targeted(name, settings.targets)]:
        raise ConfigurationError(
            f"training.lora.targets fit {named[0]!r} ({len(named)} in all), whose adapters peft could not load: "
            f"transformers changes such names of a {family} model when it loads; name other layers"
        )
    linear = [name for name in linear if name.rpartition(".")[2] not in taken and name not in lost]
    if not settings.targets and family in STATE_SPACE:
        linear = [name for name in linear if name.rpartition(".")[2] != "out_proj"]
    chosen = [name for name in linear if not settings.targets or targeted(name, settings.targets)]
    if family in STATE_SPACE and any(name.rpartition(".")[2] == "out_proj" for name in chosen):
        raise ConfigurationError(
            f"training.lora.targets {settings.targets} name out_proj, whose weight a {family} model uses without "
            "calling the layer: an adapter there would do nothing; name others, such as in_proj and x_proj"
        )
    odd = [target for target in settings.targets if not targeted_any(linear, target)]
    if odd or not chosen:
        ends = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigurationError(
            f"training.lora.targets name {odd}, which fit no linear layer of {blocks}: their names end in {ends}; a "
            "head is trained whole, by training.lora.modules_to_save"
        )
    return chosen


def parameters_of(model: nn.Module, settings: LoraSettings) -> list[str]:
    """Full names of the fused experts that get an adapter. Raises `ConfigurationError` where one is not there."""
    found = [name for name, one in model.named_parameters() if one.dim() == 3]
    for wanted in settings.parameters:
        if not targeted_any(found, wanted):
            ends = sorted({".".join(name.split(".")[-2:]) for name in found})
            raise ConfigurationError(
                f"training.lora.parameters names {wanted!r}, which fits no fused experts of the model; it has "
                f"{ends or 'none'}"
            )
    return [name for name in found if targeted(name, settings.parameters)]


def targeted_any(names: Sequence[str], target: str) -> bool:
    return any(targeted(name, [target]) for name in names)


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
        target_parameters=parameters_of(model, settings) or None,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inject_adapter_in_model(configuration, model, low_cpu_mem_usage=True)
    wanted = settings.modules_to_save or (HEADS if classifies else ())
    saved = [name for name, _ in model.named_parameters() if not is_added(name) and saves_parameter(name, wanted)]
    for name in settings.modules_to_save:
        if not any(saves_parameter(found, [name]) for found in saved):
            if reason := refusal_of_tied(model, name):
                raise ConfigurationError(reason)
            raise ConfigurationError(
                f"training.lora.modules_to_save names {name!r}, which is not a module of it outside its adapters; "
                f"its heads are {', '.join(sorted({n.partition('.')[0] for n, _ in model.named_children()}))}"
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_added(name) or name in saved)


def name_on_disk(name: str) -> str:
    """Of a parameter of a model with adapters: peft's name for what they add, the plain name for the rest."""
    if is_magnitude(name):
        return PREFIX + name.partition(MAGNITUDE)[0] + MAGNITUDE
    if is_factor(name):
        return PREFIX + name.replace(".default.", ".")
    while ".base_layer." in name:  # nested where a module holds several adapted parameters
        name = name.replace(".base_layer.", ".")
    return name
