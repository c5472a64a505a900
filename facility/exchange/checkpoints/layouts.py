"""Why a model is not trained in stages, with recomputation, with adapters or with noise: what its own parts say alone.

The coordinator asks before a federation starts, the trainer before the first step.
"""

from __future__ import annotations

from typing import Any


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
