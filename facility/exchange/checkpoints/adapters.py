"""Low-rank adapters in checkpoints: their names, and the `adapter_config.json` that peft reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from facility.exchange.checkpoints.model_files import MOST_BYTES, model_file_if_any
from facility.exchange.errors import InputError
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.strict_json import read_json

A, B = ".lora_A.", ".lora_B."
PREFIX = "base_model.model."
"""What peft puts before the names of the layers."""
MAGNITUDE = ".lora_magnitude_vector"
"""How the name of a layer's magnitudes ends (DoRA)."""
CONFIG = "adapter_config.json"
TASK_TYPES = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS"}
"""End of a model class's name -> what peft calls its task."""

MEGATRON = "megatron_config"
"""Key of an adapter_config.json with which peft imports a module of Megatron's, or another that is called so."""
HEADS = ("classifier", "score")
"""Heads of classifiers: peft saves them with an adapter."""


def is_adapter(name: str) -> bool:
    """Whether a tensor of a checkpoint belongs to an adapter: a factor, or a module that is saved whole."""
    return is_factor(name) or name.startswith(PREFIX)


def is_factor(name: str) -> bool:
    """Whether a tensor or parameter of that name is a low-rank factor."""
    return A in name or B in name


def is_magnitude(name: str) -> bool:
    """Whether a tensor or parameter of that name is DoRA's magnitudes of a layer."""
    return MAGNITUDE in name


def is_added(name: str) -> bool:
    """Whether a tensor or parameter of that name exists with an adapter only."""
    return is_factor(name) or is_magnitude(name)


def adapts_parameter(layer: str, parameters: Iterable[str]) -> bool:
    """Whether factors of that layer are those of fused experts: of the module that holds one of `parameters`.

    peft nests one adapter in the other where a module holds several.
    """
    module = layer.replace(".base_layer", "")
    return is_targeted(module, [name.rpartition(".")[0] for name in parameters])


def is_targeted(module: str, targets: Iterable[str]) -> bool:
    """Whether the layer of that name is among the `targets`, which are ends of names."""
    return any(module == target or module.endswith("." + target) for target in targets)


def is_saved_module(module: str, wanted: Iterable[str]) -> bool:
    """Whether the module of that name, or one that holds it, ends in a name of `modules_to_save`.

    As peft has it: `classifier` names DistilBERT's `pre_classifier` too.
    """
    parts = module.split(".")
    holders = [".".join(parts[: length + 1]) for length in range(len(parts))]
    return any(holder.endswith(name) for holder in holders for name in wanted)


def loaded_as(model_class: str) -> dict[str, Any]:
    """What says to peft's `AutoPeftModel...` classes how the base is loaded: its task, where peft has a word for it,
    else the class itself; {} where that is unknown ('')."""
    for ending, kind in TASK_TYPES.items():
        if model_class.endswith(ending):
            return {"task_type": kind}
    return {"auto_mapping": {"base_model_class": model_class, "parent_library": "transformers"}} if model_class else {}


def class_in(model: Path) -> str:
    """The class that a checkpoint's config.json names first; '' where there is none."""
    named = model_file_if_any(model).get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """What the adapter_config.json of a facility, or of a publisher, says. Raises `ManifestError`."""
    return read_json(directory / CONFIG, most_bytes=MOST_BYTES)


def check_no_module(directory: Path) -> None:
    """Raise `InputError` where the adapter_config.json of a model, if any, names a module for peft to import.

    For programs that load a model by its configuration alone.
    """
    if (directory / CONFIG).is_file() and read_adapter_config(directory).get(MEGATRON):
        raise InputError(
            f"{directory / CONFIG} has {MEGATRON}, with which peft would import a module; expected plain adapters: "
            "remove the key"
        )


def write_adapter_config(
    directory: Path, settings: LoraSettings, adapters: Iterable[str], *, model_class: str = ""
) -> None:
    """Write the configuration of the adapters with these names, without paths of any facility.

    `model_class`: the class of transformers that they were trained in; '': not known.
    """
    names = list(adapters)
    layers = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in names if is_factor(name)}
    targets = sorted(layer for layer in layers if not adapts_parameter(layer, settings.parameters))
    whole = {name.removeprefix(PREFIX).rpartition(".")[0] for name in names if not is_added(name)}
    configuration: dict[str, Any] = {
        "peft_type": "LORA",
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": targets,
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
        "target_parameters": sorted(settings.parameters) or None,
        "modules_to_save": saved_modules(whole, settings.modules_to_save or HEADS) or None,
        "bias": "none",
        "inference_mode": True,
        "base_model_name_or_path": "",
    } | loaded_as(model_class)
    (directory / CONFIG).write_text(json.dumps(configuration, indent=2) + "\n", encoding="utf-8")


def saved_modules(modules: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """The names of `wanted` by which these modules, or parts of such modules, were chosen; of others, their own."""
    held = list(modules)
    chosen = {name for name in wanted for module in held if is_saved_module(module, [name])}
    return sorted(chosen | {module for module in held if not is_saved_module(module, chosen)})
