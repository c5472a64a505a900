"""Low-rank adapters: injected by peft into the skeleton, the only thing trained, kept and sent.

An update holds adapter tensors under peft's names (`base_model.model.<layer>.lora_A.weight`, and
`base_model.model.<module>.weight` of a module that is trained whole) in `adapter_model.safetensors` beside an
`adapter_config.json`, so that peft loads it; its manifest says `encoding: lora`. The received model is either a
checkpoint (with or without adapter tensors in it), or adapters alone, where `training.lora.base` names a base model
that never travels.
"""

from __future__ import annotations

from torch import nn

from facility.exchange.checkpoints.adapter_targets import parameters_of, targets_of
from facility.exchange.checkpoints.adapters import HEADS, MAGNITUDE, PREFIX, is_added, is_factor, is_magnitude
from facility.exchange.checkpoints.saved_modules import refusal_of_saved, saves_parameter
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.layout import LoraSettings


def inject_adapters(model: nn.Module, settings: LoraSettings, *, classifies: bool) -> None:
    """Add adapters on the meta device; beside them only `modules_to_save` are trained from here on.

    `classifies`: the model has a classifier's head, which is saved unless others are named. Raises
    `ConfigurationError`.
    """
    import warnings

    from peft import LoraConfig, inject_adapter_in_model

    layers, experts = targets_of(model, settings), parameters_of(model, settings)
    adapted = [*layers, *(name.rpartition(".")[0] for name in experts)]
    for name in settings.modules_to_save:
        if reason := refusal_of_saved(model, name, adapted):
            raise ConfigurationError(reason)
    configuration = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft takes floats too
        lora_dropout=settings.dropout,
        target_modules=layers,
        target_parameters=experts or None,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inject_adapter_in_model(configuration, model, low_cpu_mem_usage=True)
    wanted = settings.modules_to_save or (HEADS if classifies else ())
    saved = [name for name, _ in model.named_parameters() if not is_added(name) and saves_parameter(name, wanted)]
    assert all(any(saves_parameter(found, [name]) for found in saved) for name in settings.modules_to_save)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_added(name) or name in saved)


def name_on_disk(name: str) -> str:
    """Name in the checkpoint of a parameter: peft's for what adapters add, the plain one for the rest."""
    if is_magnitude(name):
        return PREFIX + name.partition(MAGNITUDE)[0] + MAGNITUDE
    if is_factor(name):
        return PREFIX + name.replace(".default.", ".")
    while ".base_layer." in name:  # nested where a module holds several adapted parameters
        name = name.replace(".base_layer.", ".")
    return name
