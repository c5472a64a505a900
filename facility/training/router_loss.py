"""The auxiliary loss by which a mixture of experts keeps its experts evenly used, where the model asks for it.

Load balancing as the model's own code defines it (Fedus et al. 2022, arXiv 2101.03961, eqs. 4-6): transformers
computes it where config.json has `output_router_logits: true`, and scales it by `router_aux_loss_coef`. It is no sum
over positions: a batch cut into micro-batches, or shared by ranks, has their mean, weighted by predictions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from facility.exchange.errors import ConfigurationError


def asks_for_router_loss(config: Any) -> bool:
    """Whether the model's configuration switches its router's auxiliary loss on."""
    return bool(getattr(config.get_text_config(), "output_router_logits", False))


def check_router_loss(config: Any, *, pipeline: bool) -> None:
    """Raise `ConfigurationError` where a stage of a pipeline would leave the auxiliary loss out."""
    if pipeline and asks_for_router_loss(config):
        raise ConfigurationError(
            "the model's config.json has output_router_logits true: the router's auxiliary loss needs the routers of "
            "all blocks in one forward pass; train with layout.stages 1, or set output_router_logits to false in the "
            "initial model"
        )


def router_loss(model: nn.Module, output: Any) -> torch.Tensor | None:
    """The scaled auxiliary loss of a forward pass; None where the model computes none."""
    found = getattr(output, "aux_loss", None)
    scale = getattr(model, "router_aux_loss_coef", None)
    if not isinstance(found, torch.Tensor) or not scale:
        return None
    return found.float() * float(scale)
