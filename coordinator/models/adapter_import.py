"""An initial model that begins with a published adapter: a base model and the adapter's tensors, as one checkpoint.

OUT/model*.safetensors           the base, as it was
OUT/adapter_model.safetensors    the adapter's tensors under peft's names; model.safetensors.index.json names them all
OUT/adapter_config.json          what it is, without a path
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from coordinator.models.adapter_export import load_adapter, load_base, read_configuration
from facility.exchange.checkpoints.adapter_targets import targets_of
from facility.exchange.checkpoints.adapter_twins import check_twins, twins_of, without_modules, write_adapter
from facility.exchange.checkpoints.adapters import (
    CONFIG,
    PREFIX,
    adapts_parameter,
    is_adapter,
    is_added,
    is_factor,
    loaded_as,
    read_adapter_config,
)
from facility.exchange.checkpoints.checkpoint import ADAPTER, INDEX, Checkpoint, open_checkpoint
from facility.exchange.checkpoints.companions import copy_companions, refuse_links_elsewhere
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.files.durable import new_directory, write_json
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.validation import parse_dataclass

OTHER_KINDS = {
    "rank_pattern": "an adapter of several ranks (rank_pattern), where training.lora.rank is one",
    "alpha_pattern": "an adapter of several scales (alpha_pattern), where training.lora.alpha is one",
    "layer_replication": "an adapter of a model whose layers are repeated (layer_replication)",
    "trainable_token_indices": "an adapter that trains tokens (trainable_token_indices)",
    "megatron_config": "an adapter of Megatron's layers, whose module it names (megatron_config, megatron_core)",
    "lora_bias": "an adapter with biases (lora_bias)",
    "alora_invocation_tokens": "an adapter that begins to count at certain tokens (alora_invocation_tokens)",
}
"""Keys of adapter_config.json that make another kind of adapter than the federation's, and how to say so."""
LEAVE_THE_BASE = ("gaussian", "orthogonal", "eva", "mica")
"""Beginnings of factors (init_lora_weights), beside true and false, after which the base is as it was published. peft
subtracts those of others from it, as it loads such an adapter, too."""


def import_adapter(adapter: Path, *, base: Path, out: Path) -> str:
    """Write `base` with the tensors of `adapter` to `out`, which appears atomically; returns what training must say.

    peft loads the adapter over the base first. Raises `InputError` for an adapter of another kind, or of another model.
    """
    if os.path.lexists(out):
        raise InputError(f"{out} exists; choose another --out")
    refuse_links_elsewhere(base)
    refuse_links_elsewhere(adapter)
    refuse_other_kinds(adapter)
    configuration = read_configuration(adapter)
    found = open_checkpoint(adapter)
    names = sorted(found.tensors)
    if strangers := [name for name in names if not is_adapter(name)]:
        raise InputError(
            f"{adapter} holds {strangers[0]!r}, which is not a tensor of a peft adapter; expected a folder "
            "that peft's `save_pretrained` wrote"
        )
    loaded = load_base(base)
    held = open_checkpoint(base)
    if any(map(is_adapter, held.tensors)):
        raise InputError(f"{base} holds adapters already; expected a plain base model")
    twins = twins_of(loaded, names)
    check_twins(found, twins)
    lora = settings_of(adapter, loaded, configuration, names)
    configuration["target_modules"] = sorted(plain_layers(configuration, names))
    with tempfile.TemporaryDirectory(prefix="crossfed-adapter-") as known:
        (Path(known) / ADAPTER).symlink_to(found.tensors[names[0]].file.resolve())
        write_json(Path(known) / CONFIG, configuration)  # of the publisher's keys some name modules to import
        load_adapter(Path(known), loaded, names)
    names = [name for name in names if name not in twins]
    configuration = without_modules(configuration, twins) | loaded_as(type(loaded).__name__)
    with new_directory(out) as temporary:
        copy_companions(base, temporary)
        for file in {entry.file for entry in held.tensors.values()}:
            shutil.copyfile(file, temporary / file.name)
        write_adapter(
            temporary, found, {name: name for name in names}, configuration | loaded_as(type(loaded).__name__)
        )
        write_json(temporary / INDEX, index_of(held, names))
        open_checkpoint(temporary)
    lora |= {"modules_to_save": configuration["modules_to_save"]} if configuration["modules_to_save"] else {}
    added = f"training:\n  lora: {json.dumps(lora)}"
    return f"{out}: {base} with {len(names)} adapter tensors; federation.yml must say\n{added}"


def refuse_other_kinds(adapter: Path) -> None:
    """Raise `InputError` for an adapter that the federation could not go on from, with the reason."""
    file, raw = adapter / CONFIG, read_adapter_config(adapter)
    for key, kind in OTHER_KINDS.items():
        if raw.get(key):
            raise InputError(f"{file}: this is {kind}; take a plain LoRA adapter, or merge it into the base by peft")
    begun = raw.get("init_lora_weights")
    if not isinstance(begun, bool | None) and begun not in LEAVE_THE_BASE:
        raise InputError(
            f"{file}: init_lora_weights is {begun!r:.80}: this adapter belongs to the base without what its factors "
            "began as, and no such base travels; convert it by peft (save_pretrained with "
            "path_initial_model_for_weight_conversion), or merge it into the base"
        )
    if raw.get("bias", "none") != "none":
        raise InputError(f"{file}: bias is {raw['bias']!r}, expected 'none': the base's biases would have to travel")


def settings_of(adapter: Path, base: Any, configuration: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """`training.lora` of a federation whose facilities go on from the adapter: layers by the ends of their names where
    these fit no others, else by their full names. `base`: without adapters.

    Raises `InputError` unless a facility gives adapters to just the layers that this one has.
    """
    if odd := [name for name in names if ".lora_" in name and not is_added(name)]:
        raise InputError(
            f"{adapter} holds {odd[0]!r} ({len(odd)} in all), which no facility trains: take an adapter of two "
            "factors for each linear layer, or merge it into the base by peft"
        )
    if not (layers := plain_layers(configuration, names)):
        raise InputError(f"{adapter} adapts no linear layer, and every federation of adapters does; merge it by peft")
    lora: dict[str, Any] = {"rank": configuration["r"], "alpha": configuration["lora_alpha"]}
    lora |= {"targets": sorted({layer.rpartition(".")[2] for layer in layers})}
    lora |= {"rslora": True} if configuration["use_rslora"] else {}
    lora |= {"dora": True} if configuration["use_dora"] else {}
    lora |= {"parameters": configuration["target_parameters"]} if configuration["target_parameters"] else {}
    try:
        if set(targets_of(base, parse_dataclass(LoraSettings, lora))) != layers:
            lora["targets"] = sorted(layers)
            targets_of(base, parse_dataclass(LoraSettings, lora))
    except ConfigurationError as error:
        raise InputError(f"{adapter}: no federation can go on from it: {error}") from None
    return lora


def plain_layers(configuration: dict[str, Any], names: list[str]) -> set[str]:
    """The layers with factors, but for fused experts."""
    fused = configuration["target_parameters"] or ()
    layers = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in names if is_factor(name)}
    return {layer for layer in layers if not adapts_parameter(layer, fused)}


def index_of(base: Checkpoint, names: list[str]) -> dict[str, Any]:
    """The index over the base's files and the adapter's."""
    weight_map = {name: entry.file.name for name, entry in base.tensors.items()} | dict.fromkeys(names, ADAPTER)
    return {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
