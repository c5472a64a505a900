"""Which layers and fused experts of a model get adapters, and what is refused because none could.

The coordinator asks before a federation starts, the trainer when it adds the adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from facility.exchange.checkpoints.adapters import is_targeted
from facility.exchange.checkpoints.blocks import find_blocks
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.layout import LoraSettings

if TYPE_CHECKING:
    from torch import nn

STATE_SPACE = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Families whose kernels use weights without calling their layers: that of `out_proj`, on which peft refuses an
adapter. Their base stays in float32."""

RENAMED = {"laguna": ("shared_experts",)}
"""Modules of families whose own names transformers' table of published names changes too, so that adapters of theirs
are looked for where none is: its pattern `mlp.shared_expert.` fits Laguna's `mlp.shared_experts`."""


def is_linear(module: nn.Module) -> bool:
    """Whether peft's adapter can stand beside this layer.

    Routers of experts inherit from `Linear` and answer with indices and weights: those are asked, without memory.
    """
    import torch
    from torch import nn

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
    """Full names of the layers that get an adapter. Raises `ConfigurationError` where a target fits none.

    Adapters are not in the model yet. Raises `InputError` where it has no list of blocks.
    """
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
    linear = _without_refused(linear, settings, family)
    chosen = [name for name in linear if not settings.targets or is_targeted(name, settings.targets)]
    _check_state_space(chosen, settings, family)
    odd = [target for target in settings.targets if not targeted_any(linear, target)]
    if odd or not chosen:
        ends = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigurationError(
            f"training.lora.targets name {odd}, which fit no linear layer of {blocks}: their names end in {ends}; a "
            "head is trained whole, by training.lora.modules_to_save"
        )
    return chosen


def _without_refused(linear: list[str], settings: LoraSettings, family: str) -> list[str]:
    """The layers but those for which peft could make or load no adapter.

    Raises `ConfigurationError` where a target names one of those.
    """
    taken = names_of_experts(family)
    if named := sorted({target for target in settings.targets if target.rpartition(".")[2] in taken}):
        raise ConfigurationError(
            f"training.lora.targets name {named}: peft takes {', '.join(sorted(taken))} of a {family} model for its "
            "fused experts; name other layers"
        )
    lost = [name for name in linear if is_targeted(name.rpartition(".")[0], RENAMED.get(family, ()))]
    if named := [name for name in lost if settings.targets and is_targeted(name, settings.targets)]:
        raise ConfigurationError(
            f"training.lora.targets fit {named[0]!r} ({len(named)} in all), whose adapters peft could not load: "
            f"transformers changes such names of a {family} model when it loads; name other layers"
        )
    left = [name for name in linear if name.rpartition(".")[2] not in taken and name not in lost]
    if not settings.targets and family in STATE_SPACE:
        left = [name for name in left if name.rpartition(".")[2] != "out_proj"]
    return left


def _check_state_space(chosen: list[str], settings: LoraSettings, family: str) -> None:
    """Raise `ConfigurationError` for a layer of a state-space model whose weight is used without calling the layer."""
    if family in STATE_SPACE and any(name.rpartition(".")[2] == "out_proj" for name in chosen):
        raise ConfigurationError(
            f"training.lora.targets {settings.targets} name out_proj, whose weight a {family} model uses without "
            "calling the layer: an adapter there would do nothing; name others, such as in_proj and x_proj"
        )


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
    return [name for name in found if is_targeted(name, settings.parameters)]


def targeted_any(names: Sequence[str], target: str) -> bool:
    """Whether a target, an end of a name, fits one of the names."""
    return any(is_targeted(name, [target]) for name in names)
