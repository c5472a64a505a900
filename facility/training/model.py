"""The model that a checkpoint describes, built without memory, and the names its parameters have on disk."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.errors import CheckpointError, InputError
from facility.training import lora
from facility.training.parallel.shard import find_blocks


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Which attention implementation runs, and why."""

    name: str
    reason: str


def choose_attention(config: Any, factory: Any, device: torch.device, compute_dtype: torch.dtype) -> Attention:
    """flash_attention_2 on a GPU in half precision where the package is installed, else torch's own sdpa."""
    from importlib.util import find_spec

    try:
        kind = factory._model_mapping[type(config)]
    except KeyError:
        raise InputError(
            f"{factory.__name__} knows no model for {type(config).__name__}: the received model does not fit the task "
            "that the dataset was prepared for"
        ) from None
    if not getattr(kind, "_supports_sdpa", False):
        return Attention(name="eager", reason=f"{kind.__name__} has neither sdpa nor flash attention in transformers")
    if device.type != "cuda":
        return Attention(name="sdpa", reason="flash attention needs a GPU")
    if compute_dtype == torch.float32:
        return Attention(name="sdpa", reason="flash attention computes in half precision, not in float32")
    if find_spec("flash_attn") is None:
        return Attention(name="sdpa", reason="flash_attn is not installed; torch's sdpa has flash kernels of its own")
    return Attention(name="flash_attention_2", reason="a GPU, half precision and the package flash_attn are there")


def read_config(directory: Path) -> Any:
    """The checkpoint's configuration, from disk only and without running any code of the checkpoint's."""
    from transformers import AutoConfig

    if not (Path(directory) / "config.json").is_file():
        raise CheckpointError(f"{directory} holds no config.json: expected a Hugging Face checkpoint")
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory}/config.json cannot be used: {error}") from None


def build(config: Any, factory: Any, attention: Attention) -> nn.Module:
    """The model in float32 with parameters on the meta device; buffers are real."""
    from accelerate import init_empty_weights

    config = copy.deepcopy(config)  # from_config(dtype=...) writes into it
    config.use_cache = False  # with a cache, packed sequences silently lose their mask
    with init_empty_weights(include_buffers=False):
        model = factory.from_config(
            config, dtype=torch.float32, attn_implementation=attention.name, trust_remote_code=False
        )
    model.tie_weights()  # building on the meta device unties
    return model


def count_blocks(config: Any, factory: Any, attention: Attention) -> int:
    """Number of repeated blocks; 0 where the model has no list of them (it can still be trained by one rank)."""
    count = getattr(config, "num_hidden_layers", None)
    return count if isinstance(count, int) else len(find_blocks(build(config, factory, attention))[1])


def names_on_disk(model: Any, checkpoint: Checkpoint) -> dict[str, str]:
    """Checkpoint name of every parameter name of the model (a tied parameter has one name).

    Old checkpoints of a base model lack its prefix (`h.0.` for `transformer.h.0.`); tied ones may hold either name.
    """
    aliases: dict[int, list[str]] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
        first.setdefault(id(parameter), name)
    prefix = getattr(model, "base_model_prefix", "") + "."
    names: dict[str, str] = {}
    for key, candidates in aliases.items():
        candidates = [lora.name_on_disk(name) for name in candidates]
        short = [name.removeprefix(prefix) for name in candidates]
        found = next((name for name in [*candidates, *short] if name in checkpoint.tensors), candidates[0])
        names[first[key]] = found
    return names


def same_tensors(model: Any, checkpoint: Checkpoint, names: dict[str, str]) -> dict[str, str]:
    """Checkpoint tensors that repeat a tied parameter: their name to the name it is loaded from."""
    by_parameter = {id(p): names[n] for n, p in model.named_parameters() if n in names}
    repeats = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        source = by_parameter.get(id(parameter))
        if source is not None and name != source and name in checkpoint.tensors:
            repeats[name] = source
    return repeats
