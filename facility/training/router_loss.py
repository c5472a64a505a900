"""The auxiliary loss by which a mixture of experts keeps its experts evenly used, where the model asks for it.

Load balancing as the model's own code defines it (Fedus et al. 2022, arXiv 2101.03961, eqs. 4-6): transformers
computes it where config.json has `output_router_logits: true`, and scales it by `router_aux_loss_coef`. It is not a sum
over positions: a batch cut into micro-batches, or shared by ranks, has their mean, weighted by predictions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def router_loss(model: nn.Module, output: Any) -> torch.Tensor | None:
    """The scaled auxiliary loss of a forward pass; None where the model computes none."""
    found = getattr(output, "aux_loss", None)
    scale = getattr(model, "router_aux_loss_coef", None)
    if not isinstance(found, torch.Tensor) or not scale:
        return None
    return found.float() * float(scale)
