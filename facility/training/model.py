"""The model that a checkpoint describes, built without memory, and the names its parameters have on disk."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from facility.exchange.checkpoints.adapters import MAGNITUDE, PREFIX, is_added, is_magnitude
from facility.exchange.checkpoints.blocks import find_blocks
from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.checkpoints.conversion import Conversion, conversion_of, describe_missing, unfilled_parameters
from facility.exchange.checkpoints.families import most_positions
from facility.exchange.checkpoints.task_class import config_in
from facility.exchange.errors import CheckpointError, InputError
from facility.training import lora
from facility.training.dora import Adapted


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Which attention implementation runs, and why."""

    name: str
    reason: str


def choose_attention(
    config: Any, factory: Any, device: torch.device, compute_dtype: torch.dtype, *, separate: bool = False
) -> Attention:
    """flash_attention_2 on a GPU in half precision where the package is installed, else torch's own sdpa.

    `separate`: documents share a block without seeing each other; transformers' flash attention knows such blocks one
    at a time only, sdpa takes a block mask.
    """
    from importlib.util import find_spec

    kind = class_of(config, factory)
    if not getattr(kind, "_supports_sdpa", False):
        return Attention(name="eager", reason=f"{kind.__name__} has neither sdpa nor flash attention in transformers")
    if device.type != "cuda":
        return Attention(name="sdpa", reason="flash attention needs a GPU")
    if separate:
        return Attention(name="sdpa", reason="a block mask keeps the documents of a block apart")
    if compute_dtype == torch.float32:
        return Attention(name="sdpa", reason="flash attention computes in half precision, not in float32")
    if find_spec("flash_attn") is None:
        return Attention(name="sdpa", reason="flash_attn is not installed; torch's sdpa has flash kernels of its own")
    return Attention(name="flash_attention_2", reason="a GPU, half precision and the package flash_attn are there")


def class_of(config: Any, factory: Any) -> Any:
    """The class that `factory` makes of this configuration: of several (DeiT), the one that config.json names, else the
    first. Raises `InputError`."""
    try:
        kind = factory._model_mapping[type(config)]
    except KeyError:
        raise InputError(
            f"{factory.__name__} knows no model for {type(config).__name__}: the received model does not fit the task "
            "that the dataset was prepared for"
        ) from None
    if isinstance(kind, tuple):
        kind = next((one for one in kind if one.__name__ in (config.architectures or ())), kind[0])
    return kind


def read_config(directory: Path) -> Any:
    """The checkpoint's configuration, from disk only and without running any code of the checkpoint's."""
    if not os.path.isfile(Path(directory) / "config.json"):  # False, too, for a name that no file can have
        raise CheckpointError(f"{directory} holds no config.json: expected a Hugging Face checkpoint")
    return config_in(directory)


def positions_in(config: Any) -> int:
    """Tokens of the longest sequence that a model of this configuration takes; 0: it does not say."""
    names = ("model_type", "pad_token_id", "position_embedding_type", "max_position_embeddings")
    reading = config.get_text_config()
    return most_positions({name: getattr(reading, name, None) for name in names})


def build_base_model(config: Any, factory: Any, attention: Attention) -> nn.Module:
    """The model in float32 with parameters on the meta device; buffers are real."""
    from accelerate import init_empty_weights

    config = copy.deepcopy(config)  # from_config(dtype=...) writes into it
    config.architectures = config.architectures or []  # transformers looks there where a family has several classes
    config.use_cache = False  # with a cache, packed sequences silently lose their mask
    try:
        with init_empty_weights(include_buffers=False):
            model = factory.from_config(
                config, dtype=torch.float32, attn_implementation=attention.name, trust_remote_code=False
            )
    except Exception as error:  # a package that the family needs, attention that a part lacks, values of config.json
        said = " ".join(str(error).split())
        said = said if isinstance(error, ImportError | ValueError) else f"{type(error).__name__}: {said}"
        raise InputError(
            f"transformers cannot build a {config.model_type} model here with {attention.name} attention: {said[:300]}"
        ) from None
    model.tie_weights()  # building on the meta device unties
    return model


def count_blocks(config: Any, factory: Any, attention: Attention) -> int:
    """Number of repeated blocks; 0 where the model has no list of them (it can still be trained by one rank)."""
    count = getattr(config, "num_hidden_layers", None)
    return count if isinstance(count, int) else len(find_blocks(build_base_model(config, factory, attention))[1])


@dataclass(frozen=True, kw_only=True)
class Names:
    """What a model's parameters and persistent buffers are called in a checkpoint."""

    disk: dict[str, str]
    """Name in the model -> name of its local shards, saved state and updates; every name of a tied parameter has the
    same."""
    repeats: dict[str, str]
    """Checkpoint tensors that repeat a tied parameter: their name -> the name it is loaded from."""
    conversion: Conversion
    saved: dict[str, str]
    """Modules that are trained whole beside adapters: their name among the adapters -> in the base."""
    magnitudes: dict[str, Adapted]
    """DoRA's magnitudes, by their name among the adapters -> the weight whose rows they measure."""

    @property
    def known(self) -> set[str]:
        """Checkpoint tensors that some rank holds as parameters; the others are sent as received."""
        pieces = self.conversion.pieces
        made_of = {tensor for name in self.disk.values() if name in pieces for tensor in pieces[name].tensors}
        return set(self.disk.values()) | set(self.repeats) | made_of


def names_of(model: Any, checkpoint: Checkpoint) -> Names:
    """Where a checkpoint holds each parameter. Raises `CheckpointError` where it lacks one.

    The names of transformers' own conversions are honoured (see `facility.exchange.checkpoints.conversion`); a tensor
    that is made of several, or is part of one, keeps the model's name, and adapters have peft's.
    """
    own = {lora.name_on_disk(name): t for name, t in model.state_dict().items() if not is_added(name)}
    conversion = conversion_of(model, checkpoint, own)
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    disk: dict[str, str] = {}
    repeats: dict[str, str] = {}
    if absent := [name for name in unfilled_parameters(model, conversion, lora.name_on_disk) if not is_added(name)]:
        raise CheckpointError(describe_missing(checkpoint, absent))
    for first, *others in aliases.values():
        plain = [lora.name_on_disk(name) for name in (first, *others)]
        stored = [conversion.same[name] for name in plain if name in conversion.same]
        whole = [name for name in plain if name in conversion.pieces]
        disk[first] = (stored or whole or plain)[0]
        repeats |= dict.fromkeys(stored[1:], disk[first])
    saved: dict[str, str] = {}
    parameters = dict(model.named_parameters())
    if any(map(is_added, parameters)):
        for name, parameter in parameters.items():
            if parameter.requires_grad and not is_added(name):
                saved[PREFIX + lora.name_on_disk(name)] = disk[name]
                disk[name] = PREFIX + lora.name_on_disk(name)
    for first, *others in aliases.values():
        disk |= dict.fromkeys(others, disk[first])
    magnitudes = {disk[name]: adapted_weight(model, name, disk) for name in parameters if is_magnitude(name)}
    return Names(disk=disk, repeats=repeats, conversion=conversion, saved=saved, magnitudes=magnitudes)


def adapted_weight(model: Any, magnitude: str, disk: dict[str, str]) -> Adapted:
    """The weight below the adapter whose magnitudes have that name."""
    layer = magnitude.partition(MAGNITUDE)[0] + ".base_layer"
    below = model.get_submodule(layer)
    transposed = type(below).__name__ == "Conv1D"
    return Adapted(name=disk[f"{layer}.weight"], shape=tuple(below.weight.shape), transposed=transposed)
