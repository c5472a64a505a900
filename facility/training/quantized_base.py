"""The base below adapters, held in 4 bits (`training.lora.quantize_base`): which layers, and how they are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from facility.exchange.checkpoints.adapters import is_added
from facility.exchange.checkpoints.layouts import plain_layers, refusal_of_quantized
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.messages.layout import QUANTIZES, LoraSettings
from facility.exchange.messages.settings import TrainingSettings
from facility.installed import unmet_requirements
from facility.training.quantized_linear import QuantizedLinear
from facility.training.shards import LocalShard, shard_of


@dataclass(frozen=True, kw_only=True)
class QuantizedShard:
    """The rows of a quantised weight that this rank holds, to be loaded from the whole weight in the checkpoint."""

    name: str
    """Of the weight in the checkpoint."""
    layer: QuantizedLinear

    @contextmanager
    def filling(self) -> Iterator[LocalShard]:
        """Memory for the whole weight in float32, quantised once it is filled."""
        packed, scales = shard_of(self.name, self.layer.packed), shard_of(self.name, self.layer.scales)
        shape = (self.layer.out_features, self.layer.in_features)
        whole = torch.empty(shape, dtype=torch.float32, device=packed.tensor.device)
        parameter = nn.Parameter(whole, requires_grad=False)
        yield LocalShard(name=self.name, shape=shape, first=0, tensor=whole, parameter=parameter)
        self.layer.hold(whole, packed.tensor, scales.tensor, packed.first)


def quantized_layers(model: nn.Module, settings: TrainingSettings) -> dict[str, nn.Linear]:
    """The linear layers that `quantize_base` holds in 4 bits: all of the blocks that are frozen; none without it."""
    return {} if settings.lora.quantize_base == "none" else frozen_layers(model)


def frozen_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The plain linear layers of the blocks that stay as they are; `model` has its adapters already.

    As transformers quantises them for peft: embeddings, norms and the head are not among them.
    """
    return {
        name: module
        for name, module in plain_layers(model, ()).items()
        if not module.weight.requires_grad and not is_added(f"{name}.weight")
    }


def check_quantized(model: nn.Module, lora: LoraSettings) -> None:
    """Raise `ConfigurationError` or `InputError` where the base of this model cannot be quantised here; `model` has no
    adapters yet."""
    if lora.quantize_base != "none" and (lacks := unmet_requirements([QUANTIZES])):
        raise ConfigurationError(
            f"training.lora.quantize_base is {lora.quantize_base!r}, and of this Python's packages {lacks[0]}: install "
            f"it in the facility's environment (pip install '{QUANTIZES}'), or set quantize_base to none"
        )
    if reason := refusal_of_quantized(model, lora):
        raise InputError(reason)


def quantize_layers(model: nn.Module, settings: TrainingSettings) -> None:
    """Put a `QuantizedLinear` in the place of each such layer; in place, without values."""
    for name, layer in quantized_layers(model, settings).items():
        holder, _, own = name.rpartition(".")
        held = QuantizedLinear(
            name,
            layer,
            kind=settings.lora.quantize_base,
            double=settings.lora.double_quantization,
            compute_dtype=getattr(torch, settings.compute_dtype),
        )
        setattr(model.get_submodule(holder), own, held)


def quantized_shards(model: nn.Module, names: Mapping[str, str]) -> list[QuantizedShard]:
    """What this rank holds of quantised weights; `names`: of every parameter of the whole model on disk."""
    return [
        QuantizedShard(name=names[f"{name}.weight"], layer=module)
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    ]


def is_quantized(parameter: nn.Parameter) -> bool:
    """Whether a parameter holds bytes of a quantised weight or its scales: it has no tensor of its own on disk."""
    return parameter.dtype == torch.uint8
