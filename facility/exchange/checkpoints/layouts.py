"""Why a model is not trained in stages, in shards, with recomputation, with adapters, with its base in 4 bits or with
noise: what its own parts say alone.

The coordinator asks before a federation starts, the trainer before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from facility.exchange.checkpoints.adapter_targets import STATE_SPACE
from facility.exchange.checkpoints.adapters import HEADS
from facility.exchange.checkpoints.blocks import find_blocks
from facility.exchange.checkpoints.saved_modules import saves_parameter
from facility.exchange.messages.layout import QUANTIZED_BLOCK, LoraSettings

OWN_BACKWARD = ("reformer",)
"""Families with a backward pass of their own, which uses weights of a block without calling the block. Autograd leaves
it out where its input, frozen embeddings, needs no gradient."""
NOT_CALLED = ("squeezebert",)
"""Families that use weights of a block without calling the block in their forward pass."""


def asks_for_router_loss(config: Any) -> bool:
    """Whether the model's configuration switches its router's auxiliary loss on."""
    return bool(getattr(config.get_text_config(), "output_router_logits", False))


def refusal_of_router_loss(config: Any, *, pipeline: bool, private: bool) -> str:
    """Why the router's auxiliary loss cannot be trained so; empty: it can, or the model asks for none."""
    if not asks_for_router_loss(config):
        return ""
    if pipeline:
        return (
            "the model's config.json has output_router_logits true: the router's auxiliary loss needs the routers of "
            "all blocks in one forward pass; train with layout.stages 1, or set output_router_logits to false in the "
            "initial model"
        )
    if private:
        return (
            "config.json of the model has output_router_logits true: the loss that balances experts is one over "
            "all records of a batch, so no gradient is of one alone; differential privacy needs it false"
        )
    return ""


def batch_norms(model: Any) -> dict[str, Any]:
    """The batch norms that keep running statistics, by name."""
    return {name: one for name, one in _normalising_batches(model).items() if one.track_running_stats}


def refusal_of_batch_norms(model: Any, *, adapters: bool, recomputes: bool) -> str:
    """Why the batch norms' statistics would be lost or wrong; empty: they would not, or there are none."""
    found, name = batch_norms(model), type(model).__name__
    if found and adapters:
        return (
            f"training.lora sends adapters alone, and {name} has running statistics of batch normalisation, which "
            "change in training: train the whole model"
        )
    if found and recomputes:
        return (
            f"layout.activation_checkpointing runs blocks twice, and the running statistics of {name} would count "
            "every batch twice: set it to none"
        )
    if odd := next((name for name, module in found.items() if module.momentum is None), None):
        return (
            f"{odd} is a batch norm without momentum: its running statistics depend on a counter that is not "
            "averaged; give it a momentum"
        )
    return ""


def refusal_of_shards(model: Any, *, adapters: bool) -> str:
    """Why a model's blocks are not sharded; empty: nothing is known against it."""
    family = model.config.model_type
    return unreached_shards(model) if family in NOT_CALLED or (family in OWN_BACKWARD and not adapters) else ""


def unreached_shards(model: Any) -> str:
    """What is said of a model whose weights were not gathered when it used them."""
    return (
        f"{_class_of(model)} cannot be sharded: it uses weights of a block without calling the block, so that they are "
        "not gathered; train it with layout.sharding NO_SHARD"
    )


def refusal_of_adapters(model: Any, lora: LoraSettings) -> str:
    """Why adapters alone are not trained; empty: nothing is known against it. `model`: without adapters."""
    if not lora.rank or model.config.model_type not in OWN_BACKWARD:
        return ""
    saved = lora.modules_to_save or HEADS
    return "" if any(saves_parameter(name, saved) for name, _ in model.named_parameters()) else no_gradient(model)


def no_gradient(model: Any) -> str:
    """What is said of a model whose loss nothing that is trained changes."""
    return (
        f"no gradient of {_class_of(model)}'s loss reaches what is trained: found its adapters, or the parameters that "
        "training.freeze leaves, without influence on it; train the whole model (lora.rank 0, freeze nothing)"
    )


def _class_of(model: Any) -> str:
    """The model's class; FSDP2 puts its own name before it."""
    return type(model).__name__.removeprefix("FSDP")


def refusal_of_quantized(model: Any, lora: LoraSettings) -> str:
    """Why the base below adapters is not held in 4 bits; empty: it is, or is not to be. `model`: without adapters."""
    if lora.quantize_base == "none":
        return ""
    asked, family = f"training.lora.quantize_base is {lora.quantize_base!r}", model.config.model_type
    if family in STATE_SPACE:
        return f"{asked}, but kernels of a {family} model use weights without calling their layers: set it to none"
    layers = plain_layers(model, lora.modules_to_save)
    if not layers:
        return (
            f"{asked}, but no layer in the blocks of this {family} model is a plain linear layer that stays frozen: "
            "set it to none"
        )
    for name, layer in layers.items():
        if layer.in_features % QUANTIZED_BLOCK:
            return (
                f"{asked}, but {name} has {layer.in_features} inputs, expected a multiple of {QUANTIZED_BLOCK}, which "
                "share a scale: set it to none"
            )
    return ""


def plain_layers(model: Any, saved: Sequence[str]) -> dict[str, Any]:
    """The plain linear layers of the blocks, but for those that are `saved` (`training.lora.modules_to_save`)."""
    from torch import nn

    blocks, _ = find_blocks(model)
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith(blocks + ".")
        and isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and not saves_parameter(f"{name}.weight", saved)
    }


def refusal_of_stages(model: Any) -> str:
    """Why a model that normalises over the batch is not cut into stages; empty: it does not normalise so."""
    if not _normalising_batches(model):
        return ""
    return (
        f"{type(model).__name__} cannot be split into stages: it normalises over the batch, of which a stage sees "
        "one micro-batch at a time; train it with layout.stages 1"
    )


def _normalising_batches(model: Any) -> dict[str, Any]:
    from torch.nn.modules.batchnorm import _BatchNorm

    return {name: one for name, one in model.named_modules() if isinstance(one, _BatchNorm)}
